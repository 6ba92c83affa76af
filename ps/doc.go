// Package ps is a parameter server: workers push values to servers and pull values from them, each at its
// own pace. Its model, its names and its variables are those of ps-lite; docs/ps.md describes both the model
// and the protocol.
package ps
