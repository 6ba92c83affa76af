// Package rendezvouspb contains the messages of package rendezvous. Only that package uses it.
package rendezvouspb

//go:generate protoc --go_out=. --go_opt=paths=source_relative rendezvous.proto
