package ps

// A WorkerOption is an option of NewKVWorker.
type WorkerOption interface{ setApp(*appOptions) }

// An AppOption is an option of NewKVWorker, NewKVServer and NewSimpleApp.
type AppOption interface {
	WorkerOption
	ofAllApps()
}

// appOptions has what the options of an app set.
type appOptions struct {
	app      int
	slicer   Slicer
	request  func(SimpleData, *SimpleApp)
	response func(SimpleData, *SimpleApp)
}

// appOptionsOf returns what options set.
func appOptionsOf(opts []AppOption) (o appOptions) {
	for _, opt := range opts {
		opt.setApp(&o)
	}
	return o
}

type appOption func(*appOptions)

func (f appOption) setApp(o *appOptions) { f(o) }

func (f appOption) ofAllApps() {}

type workerOption func(*appOptions)

func (f workerOption) setApp(o *appOptions) { f(o) }

// App sets the number of the app, 0 to 2³¹-1. Apps with the same number in different processes belong
// together. The default is 0. A node has at most one app with a number.
func App(number int) AppOption { return appOption(func(o *appOptions) { o.app = number }) }

// OnRequest sets the function that handles the requests of SimpleApp.Request. It must answer each with
// SimpleApp.Respond once, but may do so later and from any goroutine. There is one call at a time. f must not
// call Finalize or Close of its node, which wait until it returns. Without this option, every request is
// answered with an empty body.
func OnRequest(f func(req SimpleData, app *SimpleApp)) AppOption {
	return appOption(func(o *appOptions) { o.request = f })
}

// OnResponse sets the function that gets the responses to requests of SimpleApp.Request. When the last
// response to a request has arrived, it is called for each of them, before Wait returns. The goroutine that
// calls it also receives messages, so it must not wait for messages, nor call Finalize or Close of its node.
func OnResponse(f func(resp SimpleData, app *SimpleApp)) AppOption {
	return appOption(func(o *appOptions) { o.response = f })
}

// SliceBy sets the function that splits keys among the servers. The default splits them by
// Node.ServerKeyRanges.
func SliceBy(s Slicer) WorkerOption { return workerOption(func(o *appOptions) { o.slicer = s }) }

// A PushPullOption is an option of PushPull and PushPullAsync: each PushOption and each PullOption.
type PushPullOption interface{ set(*options) }

// A PushOption is an option of Push and PushAsync.
type PushOption interface {
	PushPullOption
	ofPush()
}

// A PullOption is an option of Pull and PullAsync.
type PullOption interface {
	PushPullOption
	ofPull()
}

// An Option is an option of every push and pull.
type Option interface {
	PushOption
	PullOption
}

// options has what the options of a push or pull set.
type options struct {
	lens          []int32
	outLens       *[]int32
	cmd, priority int32
	callback      func(err error)
	zeroCopy      bool
}

// setAll applies options.
func setAll[O PushPullOption](o *options, opts []O) {
	for _, opt := range opts {
		opt.set(o)
	}
}

// forPush and forPull make a type an option of pushes and of pulls.
type (
	forPush struct{}
	forPull struct{}
	forBoth struct {
		forPush
		forPull
	}
)

func (forPush) ofPush() {}

func (forPull) ofPull() {}

// The options are values and not functions, because a small one is passed without an allocation.
type (
	cmdOption struct {
		forBoth
		cmd int32
	}
	priorityOption struct {
		forBoth
		priority int32
	}
	callbackOption struct {
		forBoth
		callback func(error)
	}
	lensOption struct {
		forPush
		lens []int32
	}
	zeroCopyOption struct{ forPush }
	outLensOption  struct {
		forPull
		lens *[]int32
	}
)

func (c cmdOption) set(o *options) { o.cmd = c.cmd }

func (p priorityOption) set(o *options) { o.priority = p.priority }

func (c callbackOption) set(o *options) { o.callback = c.callback }

func (l lensOption) set(o *options) { o.lens = l.lens }

func (zeroCopyOption) set(o *options) { o.zeroCopy = true }

func (l outLensOption) set(o *options) { o.outLens = l.lens }

// Cmd sets the command word, which the handler of the server gets as KVMeta.Cmd. The default is 0. The
// built-in handlers know InitCmd.
func Cmd(cmd int32) Option { return cmdOption{cmd: cmd} }

// Priority sets the priority of the request in the queue to the server. Requests with a higher priority are
// sent first. The default is 0.
func Priority(p int32) Option { return priorityOption{priority: p} }

// Callback makes the worker call f once when the request has completed or failed, before Wait returns. f is
// not called if PushAsync, PullAsync or PushPullAsync itself returns an error. Callbacks of a worker are
// called one at a time. f may send requests but must not wait for any, nor call Finalize or Close of its
// node.
func Callback(f func(err error)) Option { return callbackOption{callback: f} }

// Lens sets the number of values of each key of a push. Without it, each key has the same number.
func Lens(lens []int32) PushOption { return lensOption{lens: lens} }

// ZeroCopy makes a push read vals where it is, without copying it (ZPush of ps-lite), unless PS_RESEND is on.
// If vals is in memory of hvd.Alloc, a server on the same host reads it there. The caller must not change or
// free vals before the request has completed. If the request fails, or if the context of a call that waits
// ends, vals may be read until the node has left the job.
func ZeroCopy() PushOption { return zeroCopyOption{} }

// OutLens makes a pull set *lens to the number of values of each key.
func OutLens(lens *[]int32) PullOption { return outLensOption{lens: lens} }
