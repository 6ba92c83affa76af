// Package client is the client of a sidecar. It submits the operations of this process to an engine in
// another process. It implements rank.Remote, so that a rank.Rank and its operations are used in the same way
// as if the engine were in this process. docs/sidecar.md describes the protocol.
//
// Invariants:
//
//  1. A thread that waits for an operation sleeps until the state of this operation in the ring changes. The
//     goroutine read only reads answers. When the connection ends, read ends all operations and requests.
//  2. read never waits for room in the socket, because a sidecar whose answers are not read does not read
//     either. Frames that read sends go through sendLater.
//  3. The memory of a tensor is used only between the submission and the end of its operation. Results that
//     are in other memory for the sidecar are copied before Done is called.
package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

const (
	// helloTimeout is the limit of the exchange of greetings.
	helloTimeout = 30 * time.Second
	// exitTimeout is how long the sidecar may take to exit. It waits up to 10 s for other ranks.
	exitTimeout = 15 * time.Second
	// Spawn is the value of HVD_SIDECAR with which the client starts a sidecar.
	Spawn = "spawn"
	// addressPrefix begins the address of a sidecar that already runs.
	addressPrefix = "unix://"
	// firstRequest is the lowest number of a request. Smaller numbers are those of operations.
	firstRequest = 1 << 63
)

// DeadError reports that the connection to the sidecar has ended, or that there was none.
type DeadError struct {
	// Text names the sidecar and says why.
	Text string
}

func (e *DeadError) Error() string { return "hvd: " + e.Text }

// Config says which sidecar a client uses.
type Config struct {
	// Address is unix:///path, or Spawn.
	Address string
	// Binary is the path of hvdd, or "". Near has the folders in which hvdd is looked for otherwise, before
	// PATH. They are used only with Spawn.
	Binary string
	Near   []string
	// Environ is the environment of the program, in the form of os.Environ.
	Environ []string
}

// Client is a connection to a sidecar. Its methods are safe for concurrent use.
type Client struct {
	conn   *net.UnixConn // only until greetings were exchanged
	socket *os.File      // afterwards; in blocking mode
	fd     int           // of socket
	name   string        // of the sidecar, in errors
	child  *child        // nil if the client has not started the sidecar
	began  map[string]string
	ring   *ring
	memory memory
	// using is read-locked by callers that use the ring or staged memory. Close locks it before it unmaps
	// them.
	using sync.RWMutex

	writing sync.Mutex             // held while a frame is written
	reason  atomic.Pointer[string] // why this end has ended the connection
	later   later
	running sync.WaitGroup // the goroutines of the client
	ended   chan struct{}  // closed when all operations have ended after the end of the connection

	maps map[uint32]*shmem.Segment // the arenas of the sidecar; only read uses it
	me   atomic.Int64              // this rank

	mu       sync.Mutex
	over     error // why the connection has ended, or nil
	lastID   uint64
	requests map[uint64]func(*sidecarpb.Reply, error)
	job      *job // nil outside of a job
	calls    calls
	plans    plans
	closed   bool
}

// job is the job of this rank. The mu of the Client guards its fields.
type job struct {
	queues map[topo.ProcessSetID]*tensorqueue.Queue
	ended  bool
	why    error // why the job has ended; nil if it was shut down in order
}

// newClient returns a Client without a connection.
func newClient(environ []string) (c *Client, err error) {
	c = &Client{began: settings(environ), requests: make(map[uint64]func(*sidecarpb.Reply, error)),
		lastID: firstRequest, ended: make(chan struct{}), maps: make(map[uint32]*shmem.Segment)}
	c.calls.init()
	c.plans.init()
	c.later.wake = make(chan struct{}, 1)
	c.ring, err = newRing()
	return c, err
}

// Open connects to a sidecar or starts one.
func Open(ctx context.Context, cfg Config) (*Client, error) {
	c, err := newClient(cfg.Environ)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	if err := c.connect(ctx, &cfg); err != nil {
		return nil, errors.Join(err, c.ring.segment.Close(), c.child.end())
	}
	c.memory.watch(c)
	c.running.Go(c.read)
	c.running.Go(c.sendQueued)
	if err := c.sendRing(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// connect sets conn to a connection on which greetings were exchanged.
func (c *Client) connect(ctx context.Context, cfg *Config) (err error) {
	switch path, unixSocket := strings.CutPrefix(cfg.Address, addressPrefix); {
	case cfg.Address == Spawn:
		if c.child, c.conn, err = start(cfg); err != nil {
			return &DeadError{err.Error()}
		}
		c.name = fmt.Sprintf("the sidecar of this process (hvdd, process %d)", c.child.cmd.Process.Pid)
	case !unixSocket || path == "":
		return fmt.Errorf("HVD_SIDECAR is %q, want unix:///path or %s", cfg.Address, Spawn)
	default:
		c.name = "the sidecar at " + cfg.Address
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err != nil {
			return &DeadError{fmt.Sprintf("cannot connect to %s: %v", c.name, err)}
		}
		c.conn = conn.(*net.UnixConn)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	if err := c.greet(); err != nil {
		stop()
		if ctx.Err() == context.Canceled {
			err = ctx.Err()
		}
		text := c.name + ": " + err.Error()
		if c.child != nil {
			text = c.child.describe(c.name, err.Error())
		}
		return errors.Join(&DeadError{text}, c.conn.Close())
	}
	if !stop() {
		return errors.Join(&DeadError{c.name + ": the exchange of greetings was interrupted"}, c.conn.Close())
	}
	return c.leavePoller()
}

// leavePoller sets socket. Go's poller is woken each time the sidecar reads a doorbell, because the socket
// has more room then. A thread that polls the socket only for data is not.
func (c *Client) leavePoller() (err error) {
	c.socket, err = c.conn.File()
	if err = errors.Join(err, c.conn.Close()); err != nil {
		return err
	}
	c.fd = int(c.socket.Fd())
	return unix.SetNonblock(c.fd, false)
}

// greet checks who listens, and exchanges greetings.
func (c *Client) greet() error {
	if c.child == nil {
		// Another user may have taken the path. The sidecar sees all tensors.
		if err := dial.CheckUserOrRoot(c.conn); err != nil {
			return err
		}
	}
	if _, err := c.conn.Write(dial.Greeting(wire.Magic, wire.Version)); err != nil {
		return fmt.Errorf("it did not take the greeting: %w", err)
	}
	switch got, err := dial.ReadGreeting(c.conn, wire.Magic); {
	case err != nil:
		return fmt.Errorf("it did not answer the greeting: %w", err)
	case got != wire.Version:
		return fmt.Errorf("got protocol version %d, want %d: use hvdd and this library of the same version", got,
			wire.Version)
	}
	return nil
}

func (c *Client) sendRing(ctx context.Context) error {
	fd, err := unix.FcntlInt(uintptr(c.ring.segment.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Ring{
		Ring: &sidecarpb.Ring{Bytes: uint64(len(c.ring.bytes))}}}, fd)
	return err
}

// Close closes the connection. A sidecar that the client has started then exits, and Close waits for its
// exit. The rank of the sidecar fails if it is in a job. A further call does nothing.
func (c *Client) Close() error {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	// The error means that the connection has ended already.
	_ = c.send(&sidecarpb.Request{What: &sidecarpb.Request_Bye{Bye: new(sidecarpb.Bye)}}, -1, nil)
	c.fail("this process has closed the connection")
	c.running.Wait()
	// The end of the connection has woken all waiters.
	c.using.Lock()
	defer c.using.Unlock()
	errs := []error{c.socket.Close(), c.memory.close(), c.ring.segment.Close(), c.child.end()}
	for _, s := range c.maps {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// Pid returns the process ID of the sidecar if the client has started it, and otherwise 0.
func (c *Client) Pid() int {
	if c.child == nil {
		return 0
	}
	return c.child.cmd.Process.Pid
}

// Check returns why the connection or the job has ended, or nil. If the job was shut down in order, it
// returns engine.ErrShutDown.
func (c *Client) Check() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.over != nil:
		return c.over
	case c.job == nil:
		return rank.ErrNotInitialized
	case c.job.ended && c.job.why == nil:
		return engine.ErrShutDown
	}
	return c.job.why
}

// Over returns why the connection has ended, or nil. After that, only Close is of use.
func (c *Client) Over() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over
}

// fail ends the connection. The first call determines the reason.
func (c *Client) fail(reason string) {
	c.reason.CompareAndSwap(nil, &reason)
	c.shut()
}

// shut makes read return. An error means that the connection has ended already.
func (c *Client) shut() { _ = unix.Shutdown(c.fd, unix.SHUT_RDWR) }

// end ends all operations and requests, after the connection has ended because of err.
func (c *Client) end(err error) {
	reason := err.Error()
	if given := c.reason.Load(); given != nil {
		reason = *given
	}
	c.shut()
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	text := c.name + ": " + reason
	if c.child != nil && !closed {
		text = c.child.describe(c.name, reason)
	}
	c.mu.Lock()
	c.over = &DeadError{text}
	requests := c.requests
	c.requests = nil
	c.mu.Unlock()
	for _, answer := range requests {
		answer(nil, c.over)
	}
	c.calls.each(func(k *call) { c.finish(k, nil, c.over) })
	close(c.ended)
	c.ring.changed()
	c.later.close()
}

// Sending.

// encode returns q as a frame.
func encode(q *sidecarpb.Request) ([]byte, error) {
	data := protowire.AppendVarint(nil, uint64(proto.Size(q)))
	data, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(data, q)
	if err == nil && len(data) > wire.MaxFrameBytes {
		err = fmt.Errorf("the request has %d bytes, want at most %d: it has too many tensors or dimensions", len(data),
			wire.MaxFrameBytes)
	}
	return data, err
}

// write writes frames. If fd is not -1, it is sent with the first byte.
func (c *Client) write(data []byte, fd int) error {
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	for len(data) > 0 {
		n, err := unix.SendmsgN(c.fd, data, oob, nil, unix.MSG_NOSIGNAL)
		if err == unix.EINTR {
			continue
		}
		switch err {
		case nil:
		case unix.EPIPE, unix.ECONNRESET: // the sidecar may have said why before it has closed the connection
			c.shut()
			return err
		default:
			c.fail(fmt.Sprintf("sending failed: %v", err))
			return err
		}
		data, oob = data[n:], nil
	}
	return nil
}

// send sends q and gives it a number. It owns fd, which is sent with it unless it is -1. If answer is not
// nil, it is called once with the answer: by read, or with an error when the connection has ended.
func (c *Client) send(q *sidecarpb.Request, fd int, answer func(*sidecarpb.Reply, error)) error {
	if fd >= 0 {
		defer unix.Close(fd)
	}
	if answer == nil {
		answer = func(*sidecarpb.Reply, error) {}
	}
	c.mu.Lock()
	if c.over != nil {
		c.mu.Unlock()
		return c.over
	}
	c.lastID++
	q.Id = c.lastID
	switch q.What.(type) {
	case *sidecarpb.Request_Prepare, *sidecarpb.Request_Free, *sidecarpb.Request_Bye: // they are not answered
	default:
		c.requests[q.Id] = answer
	}
	c.mu.Unlock()
	data, err := encode(q)
	if err != nil {
		c.mu.Lock()
		delete(c.requests, q.Id)
		c.mu.Unlock()
		return err
	}
	// If the write fails, the connection ends, and read answers the request.
	_ = c.write(data, fd)
	return nil
}

// request sends q and waits for the answer. If ctx ends before, the sidecar still executes the request.
func (c *Client) request(ctx context.Context, q *sidecarpb.Request, fd int) (*sidecarpb.Reply, error) {
	type answer struct {
		reply *sidecarpb.Reply
		err   error
	}
	answers := make(chan answer, 1)
	if err := c.send(q, fd, func(r *sidecarpb.Reply, err error) { answers <- answer{r, err} }); err != nil {
		return nil, err
	}
	select {
	case a := <-answers:
		return a.reply, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// ask sends q and waits for the answer without a limit.
func (c *Client) ask(q *sidecarpb.Request, fd int) (*sidecarpb.Reply, error) {
	return c.request(context.Background(), q, fd)
}

// later is a queue of requests that a goroutine sends.
type later struct {
	wake   chan struct{}
	mu     sync.Mutex
	queue  []*sidecarpb.Request
	closed bool
}

func (l *later) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed, l.queue = true, nil
	close(l.wake)
}

// sendLater sends q without waiting for room in the socket. The answer is ignored.
func (c *Client) sendLater(q *sidecarpb.Request) {
	l := &c.later
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.queue = append(l.queue, q)
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// sendQueued sends the requests of sendLater.
func (c *Client) sendQueued() {
	for range c.later.wake {
		c.later.mu.Lock()
		queue := c.later.queue
		c.later.queue = nil
		c.later.mu.Unlock()
		for _, q := range queue {
			_ = c.send(q, -1, nil) // an error means that the connection has ended
		}
	}
}

// Receiving.

// read handles what the sidecar sends, until the connection ends.
func (c *Client) read() {
	var r receiver
	err := r.receive(c)
	r.close()
	c.end(err)
}

// receiver has the bytes and the descriptors that have arrived and were not used yet.
type receiver struct {
	buf []byte
	fds []int
	oob [128]byte
}

const (
	readBytes = 16 << 10 // the least room in the buffer before a read
	keptBytes = 1 << 20  // a larger buffer is freed when it is empty
)

var errClosed = errors.New("it has closed the connection")

func (r *receiver) receive(c *Client) error {
	for {
		if len(r.buf) == 0 && cap(r.buf) > keptBytes {
			r.buf = nil
		}
		if cap(r.buf)-len(r.buf) < readBytes {
			r.buf = append(make([]byte, 0, 2*len(r.buf)+readBytes), r.buf...)
		}
		fds := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
			return fmt.Errorf("receiving failed: %w", err)
		}
		n, oobn, _, _, err := unix.Recvmsg(c.fd, r.buf[len(r.buf):cap(r.buf)], r.oob[:],
			unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case err == unix.EAGAIN || err == unix.EINTR:
			continue
		case err == unix.ECONNRESET:
			return errClosed
		case err != nil:
			return fmt.Errorf("receiving failed: %w", err)
		case n == 0:
			return errClosed
		}
		r.buf = r.buf[:len(r.buf)+n]
		if err := r.take(r.oob[:oobn]); err != nil {
			return err
		}
		if err := r.frames(c); err != nil {
			return err
		}
	}
}

// take keeps the descriptors of a read.
func (r *receiver) take(oob []byte) error {
	if len(oob) == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return err
		}
		r.fds = append(r.fds, fds...)
	}
	return nil
}

// frames handles the complete frames.
func (r *receiver) frames(c *Client) error {
	used := 0
	for {
		body, n, err := wire.CutFrame(r.buf[used:])
		if err != nil {
			return err
		}
		if n == 0 {
			r.buf = r.buf[:copy(r.buf, r.buf[used:])]
			return nil
		}
		used += n
		if len(body) == 0 {
			continue
		}
		reply := new(sidecarpb.Reply)
		if err := proto.Unmarshal(body, reply); err != nil {
			return fmt.Errorf("%w: %w", wire.ErrFrame, err)
		}
		if err := r.handle(c, reply); err != nil {
			return err
		}
	}
}

// handle handles a reply.
func (r *receiver) handle(c *Client, reply *sidecarpb.Reply) error {
	switch id := reply.GetId(); {
	case id == 0:
		return r.news(c, reply)
	case id < firstRequest:
		return c.answered(reply)
	}
	c.mu.Lock()
	answer := c.requests[reply.GetId()]
	delete(c.requests, reply.GetId())
	c.mu.Unlock()
	if answer == nil {
		return fmt.Errorf("%w: got an answer to request %d, which is not pending", wire.ErrFrame, reply.GetId())
	}
	var err error
	if e := reply.GetError(); e != nil {
		err = wire.ErrorOf(e)
	}
	answer(reply, err)
	return nil
}

// news handles a reply without a request.
func (r *receiver) news(c *Client, reply *sidecarpb.Reply) error {
	if e := reply.GetError(); e != nil {
		return wire.ErrorOf(e) // the sidecar refuses this client
	}
	switch what := reply.GetWhat().(type) {
	case *sidecarpb.Reply_Arena:
		number := what.Arena.GetArena()
		if len(r.fds) == 0 {
			return fmt.Errorf("%w: got arena %d without a descriptor", wire.ErrFrame, number)
		}
		fd := r.fds[0]
		r.fds = r.fds[1:]
		s, err := shmem.Map(fd)
		if err = errors.Join(err, unix.Close(fd)); err != nil {
			return fmt.Errorf("arena %d of the sidecar: %w", number, err)
		}
		if c.maps[number] != nil {
			return errors.Join(fmt.Errorf("%w: got arena %d twice", wire.ErrFrame, number), s.Close())
		}
		c.maps[number] = s
	case *sidecarpb.Reply_DropArena:
		if s := c.maps[what.DropArena.GetArena()]; s != nil {
			delete(c.maps, what.DropArena.GetArena())
			return s.Close()
		}
	case *sidecarpb.Reply_Ended:
		var why error
		if e := what.Ended.GetError(); e != nil {
			why = wire.ErrorOf(e)
		}
		c.jobEnded(why)
	}
	return nil
}

// close closes the descriptors that were not used.
func (r *receiver) close() {
	for _, fd := range r.fds {
		_ = unix.Close(fd) // it was never used
	}
}

// jobEnded records that the job has ended.
func (c *Client) jobEnded(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if j := c.job; j != nil && !j.ended {
		j.ended, j.why = true, why
		for _, q := range j.queues {
			j.close(q)
		}
	}
}

// close makes further operations in q fail.
func (j *job) close(q *tensorqueue.Queue) {
	if j.why != nil {
		q.Close(j.why)
	} else {
		q.Close(engine.ErrShutDown)
	}
}

// queueOf returns the queue of a process set. The caller holds mu, and the process is in a job.
func (c *Client) queueOf(set topo.ProcessSetID) *tensorqueue.Queue {
	q := c.job.queues[set]
	if q == nil {
		q = tensorqueue.New()
		c.job.queues[set] = q
		if c.job.ended {
			c.job.close(q)
		}
	}
	return q
}

// settings returns the settings of the job in an environment.
func settings(environ []string) map[string]string {
	all := make(map[string]string)
	for _, v := range environ {
		name, value, _ := strings.Cut(v, "=")
		if kept(name) {
			all[name] = value
		}
	}
	return all
}

// kept reports whether the sidecar gets a variable again in each Init. The others are those of the process,
// or secrets.
func kept(name string) bool {
	switch name {
	case "HVD_SIDECAR", "HVD_SIDECAR_BINARY", "HVD_SECRET", "HVD_SECRET_FILE", "HVD_RUN":
		return false
	}
	return strings.HasPrefix(name, "HOROVOD_") || strings.HasPrefix(name, "HVD_")
}

// changed returns the settings that have changed in the environment since the connection began, and given
// without the settings that choose the sidecar.
func (c *Client) changed(environ []string, given map[string]string) map[string]string {
	now, all := settings(environ), make(map[string]string)
	for name, value := range now {
		if before, ok := c.began[name]; !ok || before != value {
			all[name] = value
		}
	}
	for name := range c.began {
		if _, ok := now[name]; !ok {
			all[name] = ""
		}
	}
	for name, value := range given {
		if name != config.SidecarVariable && name != config.SidecarBinaryVariable {
			all[name] = value
		}
	}
	return all
}

// Init joins the job and waits until all ranks have joined. environ is the environment now; settings that
// have changed in it since Open override those of the sidecar, and given overrides both.
func (c *Client) Init(ctx context.Context, environ []string, given map[string]string,
	sets [][]int) (*rank.Rank, error) {
	q := &sidecarpb.Init{Settings: c.changed(environ, given)}
	for _, ranks := range sets {
		q.ProcessSets = append(q.ProcessSets, &sidecarpb.Ranks{Ranks: int32s(ranks)})
	}
	// The job exists before the answer, because the news of its end may arrive before the answer is handled.
	j := &job{queues: make(map[topo.ProcessSetID]*tensorqueue.Queue)}
	c.mu.Lock()
	if c.job == nil {
		c.job = j
	}
	c.mu.Unlock()
	r, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Init{Init: q}}, -1)
	ready := r.GetReady()
	if err == nil && ready == nil {
		err = errors.New("init: the answer of the sidecar does not say which rank this is")
	}
	if err != nil {
		c.leave(j) // it has no effect if the process was in a job before
		return nil, err
	}
	joined := rank.Joined{Epoch: ready.GetEpoch(), Homogeneous: ready.GetHomogeneous(), Place: topo.Topology{
		Rank: int(ready.GetRank()), Size: int(ready.GetSize()),
		LocalRank: int(ready.GetLocalRank()), LocalSize: int(ready.GetLocalSize()),
		CrossRank: int(ready.GetCrossRank()), CrossSize: int(ready.GetCrossSize()),
	}, Sets: make(map[topo.ProcessSetID][]topo.Rank)}
	for _, s := range ready.GetProcessSets() {
		joined.Sets[topo.ProcessSetID(s.GetId())] = ranksOf(s.GetRanks())
	}
	c.me.Store(int64(joined.Place.Rank))
	return rank.NewRemote(joined, c), nil
}

// leave ends the job j in this process.
func (c *Client) leave(j *job) {
	c.mu.Lock()
	if c.job == j {
		c.job = nil
	}
	c.mu.Unlock()
}

// Shutdown makes the rank leave the job. It returns when all its operations have ended. If the job has
// failed, it returns the reason, and the rank has left the job nevertheless.
func (c *Client) Shutdown(ctx context.Context, why engine.Departure) error {
	c.mu.Lock()
	j := c.job
	if j == nil {
		c.mu.Unlock()
		return nil
	}
	for _, q := range j.queues {
		q.Close(engine.ErrShutDown)
	}
	c.mu.Unlock()
	_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Shutdown{
		Shutdown: &sidecarpb.Shutdown{Reason: why.Reason, Failed: why.Failed}}}, -1)
	if ctx.Err() == nil {
		c.Drive(ctx, nil, func() bool { return c.calls.none() })
	}
	c.leave(j)
	c.plans.clear(c)
	return err
}

// NewUniqueID makes an id by which the ranks of a job can meet. The sidecar serves them.
func (c *Client) NewUniqueID(ctx context.Context, environ []string, given map[string]string) (string, error) {
	r, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_NewUniqueId{
		NewUniqueId: &sidecarpb.NewUniqueID{Settings: c.changed(environ, given)}}}, -1)
	return r.GetUniqueId().GetText(), err
}

// StartTimeline starts the timeline of this rank. path must be absolute.
func (c *Client) StartTimeline(ctx context.Context, path string, markCycles bool) error {
	_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_StartTimeline{
		StartTimeline: &sidecarpb.StartTimeline{Path: path, MarkCycles: markCycles}}}, -1)
	return err
}

// StopTimeline ends the timeline of this rank. It returns when the file is complete.
func (c *Client) StopTimeline(ctx context.Context) error {
	_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_StopTimeline{
		StopTimeline: new(sidecarpb.StopTimeline)}}, -1)
	return err
}

func int32s[N ~int | ~int32](all []N) []int32 {
	out := make([]int32, len(all))
	for i, n := range all {
		out[i] = int32(n)
	}
	return out
}

func ranksOf(all []int32) []topo.Rank {
	out := make([]topo.Rank, len(all))
	for i, n := range all {
		out[i] = topo.Rank(n)
	}
	return out
}
