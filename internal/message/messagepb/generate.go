// Package messagepb is the protobuf encoding of requests and responses. Package message encodes them by
// itself, and its tests compare the result with this package.
package messagepb

//go:generate protoc --go_out=. --go_opt=paths=source_relative message.proto
