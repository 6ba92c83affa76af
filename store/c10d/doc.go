// Package c10d is PyTorch's TCPStore protocol: a [Server] to which PyTorch processes of any version connect,
// on one port, and a [Store] that is a client of PyTorch's own server, as torchrun has one.
//
// The protocol has no authentication, and no field for it: any process that reaches the port can read and
// write everything. So a Server belongs on a loopback address, unless the network is trusted.
//
// There are two dialects. Since PyTorch 2.2 a client begins with a validation, and operations are numbered
// from 1. Before, they were numbered from 0, without one for validation; 2.1 left out watching, which moves
// what follows. A Server tells them apart: a connection that does not begin with a validation is old, and one
// that uses an operation which only 2.1 has is of 2.1. Two numbers are ambiguous until then: 7 is watch_key
// up to 2.0 and delete_key in 2.1, 8 is delete_key up to 2.0 and append in 2.1. A Server takes them for those
// of 2.0, unless [Config] says otherwise, and refuses watch_key.
//
// A Server differs from PyTorch's where that is better for clients of any version:
//
//   - compare_set wakes those who wait for the key;
//   - a wait that its client has given up is forgotten when the next request comes on the connection, so its answer is not
//     taken for that of another. Old clients give up without saying so;
//   - no length is believed: memory is taken for bytes that have come.
package c10d
