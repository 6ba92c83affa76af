// Package sidecarpb is what a sidecar and its clients say to each other.
package sidecarpb

//go:generate protoc --go_out=. --go_opt=paths=source_relative sidecar.proto
