// Package pspb contains the header of the messages of the parameter server.
package pspb

//go:generate protoc --go_out=. --go_opt=paths=source_relative header.proto
