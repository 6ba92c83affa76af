// Package c10d implements PyTorch's TCPStore protocol. PyTorch processes of any version can connect to its
// [Server], all on one port. Its [Store] is a client of PyTorch's own servers, such as torchrun's.
//
// The protocol has no authentication: any process that can connect to the port can read and change
// everything. So a Server should listen on a loopback address, unless the network is trusted.
//
// The protocol has three dialects. Since PyTorch 2.2 a client first sends a validation, and operations are
// numbered from 1. Before 2.2 there was no validation, and operations were numbered from 0. PyTorch 2.1 had
// removed watch_key, so the operations after watch_key have other numbers than in earlier versions. A Server
// detects the dialect of a client: if the connection does not start with a validation, the client is older
// than 2.2. If such a client uses an operation that only 2.1 has, the client is PyTorch 2.1. Until it does,
// two numbers are ambiguous: 7 is watch_key up to 2.0 and delete_key in 2.1, and 8 is delete_key up to 2.0
// and append in 2.1. A Server interprets them as 2.0 does, unless [Config] says otherwise, and refuses
// watch_key.
//
// In some cases, a Server behaves better than PyTorch's, for clients of any version:
//
//   - compare_set wakes clients that wait for the key.
//   - Old clients give up a wait without telling the server. When the next request arrives on the connection,
//     the Server cancels the wait, so that the client does not take the answer to the wait for the answer to
//     the new request.
//   - The Server does not trust lengths in requests. It allocates memory as bytes arrive.
package c10d
