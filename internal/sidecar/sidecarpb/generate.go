// Package sidecarpb contains the messages between a sidecar and its clients.
package sidecarpb

//go:generate protoc --go_out=. --go_opt=paths=source_relative sidecar.proto
