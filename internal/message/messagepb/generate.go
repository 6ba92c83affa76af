// Package messagepb is the protobuf encoding of requests and responses.
package messagepb

//go:generate protoc --go_out=. --go_opt=paths=source_relative message.proto
