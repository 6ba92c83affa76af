// Package rendezvouspb is the encoding of what package rendezvous says. Only that package uses it.
package rendezvouspb

//go:generate protoc --go_out=. --go_opt=paths=source_relative rendezvous.proto
