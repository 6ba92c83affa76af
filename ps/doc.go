// Package ps is a parameter server: workers push values to servers and pull values from them, each at its own
// pace. Its model, its words and its variables are those of ps-lite; docs/ps.md describes the model and the
// protocol, and lists the names of ps-lite beside those of this package.
//
// A job has nodes of three roles: one scheduler, and any numbers of servers and workers. They usually run the
// same program. "hvdrun --servers 2 --workers 4 program" starts them all, and sets the variables from which
// Join learns what each of them is:
//
//	func run(ctx context.Context) error {
//		node, err := ps.Join(ctx, ps.Config{})
//		if err != nil {
//			return err
//		}
//		defer node.Close() // does nothing after Finalize
//		switch node.Role() {
//		case ps.Server:
//			_, err = ps.NewKVServer(node, ps.Sum[float32]())
//		case ps.Worker:
//			err = work(ctx, node)
//		}
//		if err != nil {
//			return err
//		}
//		return node.Finalize(ctx) // waits for all nodes; meanwhile a server serves
//	}
//
//	func work(ctx context.Context, node *ps.Node) error {
//		w, err := ps.NewKVWorker[float32](node)
//		if err != nil {
//			return err
//		}
//		keys := []uint64{3, 5} // sorted
//		if err := w.Push(ctx, keys, []float32{1, 2}); err != nil {
//			return err
//		}
//		if err := node.Barrier(ctx, ps.WorkerGroup); err != nil {
//			return err
//		}
//		var sums []float32
//		return w.Pull(ctx, keys, &sums) // sums of the pushes of all workers
//	}
//
// # Requests
//
// Push, Pull and PushPull wait for the servers. PushAsync, PullAsync, PushPullAsync and SimpleApp.Request
// return a Request, which the program waits for later, or which calls a Callback. Messages belong to an app,
// which has a number (App). So a job can have several tables of values, also with different types.
//
// # Handlers
//
// A handler decides what a push does with the values of a server. Sum and Assign are for all types of values.
// SGD, Momentum, Adagrad and Adam are optimizers: a push has gradients, and a pull gets the weights. A push
// with Cmd(InitCmd) sets the weights at first. A KVHandler is a handler of the program, which may answer a
// request later:
//
//	ps.NewKVServer(node, ps.KVHandler[float32](func(meta ps.KVMeta, data ps.KVPairs[float32],
//		s *ps.KVServer[float32]) {
//		if meta.Push {
//			store(data.Keys, data.Vals)
//		}
//		var answer ps.KVPairs[float32]
//		if meta.Pull {
//			answer.Vals = load(data.Keys)
//		}
//		if err := s.Respond(meta, answer); err != nil {
//			log.Print(err)
//		}
//	}))
//
// With HVD_PS_REPLICAS=1 in the environment or in Config.Settings of all nodes, two servers have the values
// of each key, and no acknowledged push is lost if one of them dies.
//
// # Errors
//
// Use errors.As and errors.Is to distinguish them:
//
//   - *UsageError: the arguments of a call are wrong, and nothing was sent.
//   - *NodeError: a node that the call needs has died or left, or cannot be reached.
//   - *RemoteError: a node has answered with an error.
//   - ErrFinalized: this node has left the job.
//
// A call also fails when its context ends, or after HVD_OPERATION_TIMEOUT_SECONDS. Join, Finalize and
// AwaitReturn wait for other programs, so for them only the context counts.
package ps
