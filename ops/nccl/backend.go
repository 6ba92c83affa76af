//go:build nccl && cgo

package nccl

import "C"

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
)

// Register returns the Registration of the backend.
func (l *Library) Register(cfg Config) ops.Registration {
	return ops.Registration{ID: message.NCCL, Plan: cfg.plan, Lists: ops.Always, Devices: true,
		New: func(set topo.ProcessSetID, ranks []topo.Rank, me int) (ops.Backend, error) {
			if cfg.Streams > 1 && l.Version < 21700 {
				return nil, fmt.Errorf("nccl: %s has version %s, want at least 2.17 for %d streams "+
					"(HOROVOD_NUM_NCCL_STREAMS)", l.File, versionText(l.Version), cfg.Streams)
			}
			host, err := cfg.Host.New(set, ranks, me)
			if err != nil {
				return nil, err
			}
			cfg.Streams = max(cfg.Streams, 1)
			return &backend{library: l, cfg: cfg, host: host, ranks: ranks, me: me, n: len(ranks),
				stream: int(set) % cfg.Streams}, nil
		}}
}

// backend is the ops.Backend of one process set. An error ends it.
type backend struct {
	library *Library
	cfg     Config
	host    ops.Backend
	ranks   []topo.Rank
	me, n   int
	stream  int // the number of the stream of each device
	comms   []*communicator
	// activities are those of the operation that the device has not begun, for the timeline.
	activities []activity
	err        error // the error that ended the backend, or nil

	op      ops.Operation  // the operation in progress
	part    ops.DevicePart // a copy of op.Device
	started bool
	// launched is set if the operation in progress, or one before that it continues, may have enqueued work
	// on the device.
	launched bool
	// continued is set if the next operation is another part of the one before.
	continued bool

	device *device // of the operation in progress
	comm   *communicator
	id     [idBytes]byte
	packed []byte // the buffer to which the tensors of a reduction were copied, or nil
	copies []cuda.Copy
	sent   []byte  // the sizes of the blocks that this rank sends, for the host backend
	sizes  []byte  // the sizes of the blocks that it receives
	counts []int64 // the same as numbers
	out    []byte
}

// place is a stream of a device of this rank.
type place struct{ device, stream int }

// device is a device with a stream for process sets of this rank, and with memory for packed tensors, which
// only work on the stream uses.
type device struct {
	*cuda.Device
	finisher
	stream *cuda.Stream
	// maxCTAs is the greatest number of blocks of an operation on the stream. 0 means that NCCL chooses.
	maxCTAs int
	// ranges shows the launches to a tool.
	ranges *cuda.Ranges
	fused  []byte
	// reserved is set when the first operation has allocated fused.
	reserved bool
	// retired are former values of fused. They are freed at the end, because freeing memory waits for the
	// device.
	retired [][]byte
}

// plan implements ops.Planner.
func (cfg Config) plan(members []topo.Rank, r *message.Response, _ int64,
	_ *message.Tuning) (message.Algorithm, error) {
	if setting, refused := cfg.InHost[r.Kind]; refused {
		return message.NoAlgorithm, fmt.Errorf("%s is not nccl", setting)
	}
	if !r.Kind.Reduces() {
		return message.NoAlgorithm, nil
	}
	if err := tensor.CheckReduce(r.Op, r.DType); err != nil {
		return message.NoAlgorithm, err
	}
	dt, op := r.DType, r.Op.Base()
	_, has := types[dt]
	refusal := ""
	factor := r.Prescale * r.Postscale
	if r.Op.IsAverage() {
		factor /= float64(len(members))
	}
	switch scaled := r.Prescale != 1 || r.Postscale != 1; {
	case !has:
		refusal = fmt.Sprintf("NCCL has no type for %v", dt)
	case r.Wire.Valid():
		refusal = "tensors on a device are not compressed"
	case op == tensor.Adasum:
		refusal = "NCCL has no adasum"
	case scaled && (op != tensor.Sum || !dt.IsFloat()):
		refusal = "NCCL scales only sums and averages of floats"
	case r.Op == tensor.AverageActive && !dt.IsFloat():
		refusal = "NCCL divides integers only by the number of all ranks"
	case scaled && !isNormal(factor, dt):
		refusal = fmt.Sprintf("NCCL multiplies by %v, the product of all factors, which is no normal number of "+
			"type %v", factor, dt)
	case dt == tensor.Float16 && r.Prescale < 1 && r.Postscale > 1:
		refusal = "NCCL applies the postscale before the reduction, where it would undo the prescale"
	case cfg.Deterministic && dt.IsFloat() && (op == tensor.Sum || op == tensor.Product):
		refusal = "NCCL may add in any order, but HVD_DETERMINISTIC is set"
	default:
		return message.NoAlgorithm, nil
	}
	return message.NoAlgorithm, errors.New(refusal)
}

// isNormal reports whether x is a normal number of the floating-point type dt, neither 0 nor too small or
// large for its precision.
func isNormal(x float64, dt tensor.DType) bool {
	smallest, largest := 0x1p-126, float64(math.MaxFloat32)
	switch dt {
	case tensor.Float16:
		smallest, largest = 0x1p-14, 65504
	case tensor.BFloat16:
		largest = 0x1.fep127
	case tensor.Float64:
		smallest, largest = 0x1p-1022, math.MaxFloat64
	}
	return math.Abs(x) >= smallest && math.Abs(x) <= largest
}

// Start implements ops.Backend.
func (b *backend) Start(op ops.Operation) error {
	switch {
	case b.err != nil:
		return fmt.Errorf("ops/nccl: %v: the backend has failed before: %w", op.Kind, b.err)
	case b.started:
		return b.fail(errors.New("Start was called for another operation before this one had finished"))
	case op.Device.Err != nil: // Close aborts the communicators, because Start must not wait
		b.err = fmt.Errorf("ops/nccl: %v: %w", op.Kind, op.Device.Err)
		b.library.Fail(b.err)
		return b.err
	}
	b.op, b.part, b.started, b.launched = op, *op.Device, true, b.launched && b.continued
	return nil
}

// Step implements ops.Backend. Functions of CUDA and NCCL may take long, so it does nothing if wait is not
// set.
func (b *backend) Step(ctx context.Context, wait bool) (ops.Progress, error) {
	switch {
	case b.err != nil:
		return ops.Waiting, fmt.Errorf("ops/nccl: Step was called for a backend that has failed before: %w",
			b.err)
	case !b.started:
		return ops.Waiting, errors.New("ops/nccl: Step was called without an operation in progress")
	case !wait:
		return ops.Blocked, nil
	}
	f, err := b.run(ctx)
	if err != nil {
		return ops.Waiting, b.fail(err)
	}
	b.continued = b.part.More
	b.op, b.part, b.started, b.launched, b.packed = ops.Operation{}, ops.DevicePart{}, false, b.continued, nil
	switch {
	case f == nil:
		return ops.Finished, nil
	case f.follower == nil:
		b.err = f.land(f.isDone)
		if b.err != nil {
			return ops.Waiting, b.err
		}
		return ops.Finished, nil
	}
	f.device.add(f)
	return ops.Launched, nil
}

// run launches the operation. If it goes on on the device and is not to be continued by another part, which
// comes later in the stream, run returns a flight.
func (b *backend) run(ctx context.Context) (*flight, error) {
	if err := b.choose(); err != nil {
		return nil, err
	}
	if err := b.awaitTurn(ctx); err != nil {
		return nil, err
	}
	if b.part.HostBuf {
		b.passTurn()
		b.enter(ops.Exchanging)
		return nil, b.onHost(ctx, b.op)
	}
	b.device.reserve(b.cfg.FusionBytes)
	if b.comm == nil {
		b.enter(ops.Connecting)
		if err := b.connect(ctx); err != nil {
			return nil, err
		}
	}
	if !b.continued {
		b.enter(ops.AwaitingData)
	}
	if b.op.Kind.SendsRows() {
		if err := b.exchangeSizes(ctx); err != nil {
			return nil, err
		}
	}
	others := max(len(b.op.Tensors)-1, 0) // a rank that has joined has no tensors
	err := b.device.ranges.In(b.op.Kind.String(), b.part.Name, others, func() error {
		if err := b.launch(); err != nil {
			return err
		}
		return b.unpack()
	})
	if err != nil || b.part.More {
		return nil, err
	}
	f, err := b.depart(ctx)
	b.passTurn()
	if err == nil && len(b.part.Streams) > 0 {
		b.part.Follower.Launched()
	}
	return f, err
}

// choose chooses the device and, if it exists, the communicator of the operation.
func (b *backend) choose() error {
	index, ok := b.part.Devices[b.me].CUDA()
	if !ok {
		n, err := b.library.Count()
		if err != nil {
			return err
		}
		index = b.cfg.Device % n
	}
	b.comm = nil
	d, err := b.library.device(place{index, b.stream}, &b.cfg)
	if err != nil {
		return err
	}
	b.device = d
	for _, c := range b.comms {
		if slices.Equal(c.devices, b.part.Devices) {
			b.comm = c
		}
	}
	return nil
}

// awaitTurn waits until the operation may be launched. It may not before all operations that come before it
// in the order of the rank, because operations of other process sets may be in the same stream, and because
// NCCL and CUDA may wait for the work of all streams of a device.
func (b *backend) awaitTurn(ctx context.Context) error {
	l := b.library
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil && b.part.Order > l.next {
		defer context.AfterFunc(ctx, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.turn.Broadcast()
		})()
		for l.err == nil && b.part.Order > l.next && ctx.Err() == nil {
			l.turn.Wait()
		}
	}
	if l.err == nil && b.part.Order > l.next {
		return context.Cause(ctx)
	}
	return l.afterFailure()
}

// passTurn lets the next operation of the rank be launched.
func (b *backend) passTurn() {
	if b.part.More {
		return
	}
	l := b.library
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = max(l.next, b.part.Order+1)
	l.turn.Broadcast()
}

// device returns the stream at p. It makes the stream when it is called for the first time.
func (l *Library) device(p place, cfg *Config) (*device, error) {
	ranges := l.ranges()
	l.mu.Lock()
	defer l.mu.Unlock()
	if d := l.devices[p]; d != nil {
		return d, nil
	}
	of, err := l.CUDA.Device(p.device)
	if err != nil {
		return nil, err
	}
	d := &device{Device: of, ranges: ranges}
	d.changed.L = &d.finisher.mu
	if cfg.Streams > 1 {
		n, err := of.Processors()
		if err != nil {
			return nil, err
		}
		d.maxCTAs = maxCTAs(n, cfg.Streams)
	}
	if d.stream, err = of.NewUrgentStream(); err != nil {
		return nil, err
	}
	l.devices[p] = d
	return d, nil
}

// maxReserved is the maximum number of bytes that the first operation on a stream allocates.
const maxReserved = 64 << 20

// reserve allocates the buffer for fused tensors before the first operation, if the device has room for it.
// Allocating may wait for the device, so it takes place in the turn of the operation and without a lock.
func (d *device) reserve(fusionBytes int) {
	if !d.reserved {
		d.fused, _ = d.Alloc(min(fusionBytes, maxReserved)) // else an operation that needs it tries again
		d.reserved = true
	}
}

// maxCTAs returns how many blocks of threads an operation may have so that those of all streams together
// occupy at most half of the multiprocessors, at one block for each. An operation waits on the device for the
// other ranks. If two operations could not be on a device at the same time, one rank could run the first one
// and another rank the second one, for ever. NCCL itself has at most 32 blocks.
func maxCTAs(processors, streams int) int { return min(max(processors/(2*streams), 1), 32) }

// connect makes the communicator of the operation. The first rank of the set makes the unique id.
func (b *backend) connect(ctx context.Context) error {
	if b.me == 0 {
		if err := b.library.newID(&b.id); err != nil {
			return err
		}
	}
	if err := b.onHost(ctx, ops.Operation{Kind: message.Broadcast, Buf: b.id[:]}); err != nil {
		return err
	}
	late := &ops.UnknownRankError{Ranks: b.ranks, Err: fmt.Errorf("NCCL has not connected the ranks in %v "+
		"(HOROVOD_GLOO_TIMEOUT_SECONDS): NCCL_SOCKET_IFNAME selects the network interface, and "+
		"NCCL_DEBUG=INFO shows what NCCL tries", b.cfg.StartTimeout)}
	ctx, cancel := context.WithTimeoutCause(ctx, b.cfg.StartTimeout, late)
	defer cancel()
	c, err := b.library.join(ctx, &b.id, b.n, b.me, b.device)
	if err == nil {
		b.comm = c
		b.comms = append(b.comms, c)
		c.devices = slices.Clone(b.part.Devices)
	}
	return err
}

// onHost runs an operation of the host backend. All ranks plan the same algorithm.
func (b *backend) onHost(ctx context.Context, op ops.Operation) (err error) {
	r := message.Response{Kind: op.Kind, DType: tensor.Uint8, Shape: tensor.Shape{int64(len(op.Buf))}}
	if op.Algorithm, err = b.cfg.Host.Plan(b.ranks, &r, int64(len(op.Buf)), nil); err != nil {
		return err
	}
	return ops.Run(ctx, b.host, op)
}

// exchangeSizes exchanges the sizes of the blocks of an alltoall, gather or scatter, and allocates its
// output.
func (b *backend) exchangeSizes(ctx context.Context) (err error) {
	b.sent = b.sent[:0]
	for _, n := range b.op.Counts {
		b.sent = binary.NativeEndian.AppendUint64(b.sent, uint64(n))
	}
	each := make([]int64, b.n)
	for i := range each {
		each[i] = 8
	}
	err = b.onHost(ctx, ops.Operation{Kind: message.Alltoall, Buf: b.sent, Counts: each,
		Allocate: func(counts []int64) ([]byte, error) {
			for i, n := range counts {
				if n != 8 {
					return nil, fmt.Errorf("got %d bytes with the size of a block from rank %d, want 8", n, i)
				}
			}
			b.sizes = make([]byte, 8*b.n)
			return b.sizes, nil
		}})
	if err != nil {
		return err
	}
	b.counts = b.counts[:0]
	for i := range b.n {
		n := int64(binary.NativeEndian.Uint64(b.sizes[8*i:]))
		if n < 0 || n > math.MaxInt64/int64(b.n) {
			return fmt.Errorf("got a block of %d bytes from rank %d, want 0 to %d", n, b.ranks[i],
				math.MaxInt64/b.n)
		}
		b.counts = append(b.counts, n)
	}
	if b.out, err = b.op.Allocate(b.counts); err == nil && b.out == nil {
		b.out, err = b.device.buffer(int(sum(b.counts)))
	}
	b.part.Ready = b.op.Device.Ready
	return err
}

func sum(counts []int64) (n int64) {
	for _, c := range counts {
		n += c
	}
	return n
}

// launch enqueues the operation.
func (b *backend) launch() error {
	b.launched = true
	for _, e := range b.part.Ready {
		if err := b.device.stream.Wait(e); err != nil {
			return err
		}
	}
	if !b.packs() {
		if err := b.mark(ops.Exchanging); err != nil {
			return err
		}
	}
	return b.device.Use(func() error {
		switch op := &b.op; op.Kind {
		case message.Allreduce, message.Reduce:
			return b.reduce()
		case message.Reducescatter:
			return b.reduceScatter()
		case message.Allgather:
			return b.allGather()
		case message.Broadcast:
			return b.broadcast()
		case message.Alltoall, message.Gather, message.Scatter:
			return b.comm.use(func() error { return b.comm.group(b.exchange) })
		}
		return fmt.Errorf("%v is not supported", b.op.Kind)
	})
}

// unpack enqueues the copies from the buffer to which the tensors were copied.
func (b *backend) unpack() error {
	if b.packed == nil || !b.getsResult() {
		return nil
	}
	if err := b.mark(ops.Unpacking); err != nil {
		return err
	}
	return b.copyAll(b.packed, func(t ops.Tensor, packed []byte) cuda.Copy {
		return cuda.Copy{To: t.Out, From: packed}
	})
}

// depart marks the end of the operation in the stream, for which the streams of the program wait. If one of
// them is being captured for a graph, it cannot, and the operation is reported only at its end.
func (b *backend) depart(ctx context.Context) (*flight, error) {
	d := b.device
	done, err := b.library.Devices.Mark(d.Index(), d.stream.Handle())
	if err != nil {
		return nil, err
	}
	all := true
	for _, s := range b.part.Streams {
		waits, err := d.OfHandle(s).Follow(done)
		if err != nil {
			return nil, err
		}
		all = all && waits
	}
	if !all {
		b.part.Streams = nil
	}
	f := d.take()
	f.kind, f.ranks, f.ctx, f.comm, f.device, f.done = b.op.Kind, b.ranks, ctx, b.comm, d, done
	f.follower, f.enter = b.part.Follower, b.part.Enter
	f.activities, b.activities = b.activities, f.activities
	return f, nil
}

// getsResult reports whether this rank gets the result of an allreduce or a reduce.
func (b *backend) getsResult() bool { return b.op.Kind == message.Allreduce || b.op.Root == b.me }

// packs reports whether the tensors of the operation are copied to a buffer on the device.
func (b *backend) packs() bool { return len(b.op.Tensors) > 1 }

// pack returns the input and the output of an allreduce or of a reduce. If there is one tensor, they are
// those of the tensor. Several tensors are copied to a buffer.
func (b *backend) pack() (in, out []byte, err error) {
	tensors := b.op.Tensors
	if len(tensors) == 0 {
		in, err = b.neutral(b.part.NumBytes)
		return in, in, err
	}
	if len(tensors) == 1 {
		return tensors[0].In, tensors[0].Out, nil
	}
	n := 0
	for _, t := range tensors {
		n += int(ops.Padded(int64(len(t.In))))
	}
	buf, err := b.device.buffer(n)
	if err != nil {
		return nil, nil, err
	}
	if err := b.mark(ops.Packing); err != nil {
		return nil, nil, err
	}
	b.packed = buf
	if err := b.copyAll(buf, func(t ops.Tensor, packed []byte) cuda.Copy {
		return cuda.Copy{To: packed, From: t.In}
	}); err != nil {
		return nil, nil, err
	}
	return buf, buf, b.mark(ops.Exchanging)
}

// copyAll enqueues the copy that f returns for each tensor and its place in the buffer buf. All ranks reduce
// the gaps between the places too. Tensors without elements need none.
func (b *backend) copyAll(buf []byte, f func(t ops.Tensor, packed []byte) cuda.Copy) error {
	b.copies = b.copies[:0]
	for _, t := range b.op.Tensors {
		if n := len(t.In); n > 0 {
			b.copies, buf = append(b.copies, f(t, buf[:n:n])), buf[ops.Padded(int64(n)):]
		}
	}
	err := b.device.stream.CopyAll(b.copies)
	clear(b.copies)
	return err
}

// neutral returns n bytes of neutral elements on the device.
func (b *backend) neutral(n int64) (buf []byte, err error) {
	if buf, err = b.device.buffer(int(n)); err != nil {
		return nil, err
	}
	if b.op.Op == tensor.Sum {
		return buf, b.device.stream.Fill(buf, 0)
	}
	first, err := b.library.neutrals(b.device.Device, b.op.Op, b.op.DType)
	if err != nil {
		return nil, err
	}
	have := min(len(first), len(buf))
	for err = b.device.stream.Copy(buf[:have], first[:have]); err == nil && have < len(buf); {
		more := min(have, len(buf)-have)
		err = b.device.stream.Copy(buf[have:][:more], buf[:more])
		have += more
	}
	return buf, err
}

// reduction is a reduction of elements of a type on a device.
type reduction struct {
	device int
	op     tensor.ReduceOp
	dt     tensor.DType
}

// pinned is memory of the host for copies to a device.
type pinned struct {
	device *cuda.Device
	memory []byte
}

// neutrals returns some neutral elements in pinned memory of the host, which nothing changes.
func (l *Library) neutrals(on *cuda.Device, op tensor.ReduceOp, dt tensor.DType) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := reduction{on.Index(), op, dt}
	if made := l.pinned[key].memory; made != nil {
		return made, nil
	}
	fill, err := kernel.Neutral(op, dt)
	if err != nil {
		return nil, err
	}
	buf, err := on.AllocHost(4096)
	if err != nil {
		return nil, err
	}
	fill(buf)
	l.pinned[key] = pinned{on, buf}
	return buf, nil
}

// buffer returns n bytes on the device, which are valid until the next call. A larger buffer has at least
// twice the size of the one before, so that the buffers together take less than twice the size of the last
// one. If the device has no room for that, the larger buffer has n bytes.
func (d *device) buffer(n int) (_ []byte, err error) {
	if len(d.fused) < n {
		larger, err := d.Alloc(max(n, 2*len(d.fused), 1<<20))
		if err != nil {
			larger, err = d.Alloc(n)
		}
		if err != nil {
			return nil, fmt.Errorf("%w, for the tensors of a launch: the allocator of the program may keep memory that "+
				"it does not use (torch.cuda.empty_cache()), and a lower HOROVOD_FUSION_THRESHOLD needs less", err)
		}
		d.retired, d.fused = append(d.retired, d.fused), larger
	}
	return d.fused[:n], nil
}

// reductions are the values of ncclRedOp_t.
var reductions = map[tensor.ReduceOp]C.int{
	tensor.Sum: redSum, tensor.Product: redProd, tensor.Min: redMin, tensor.Max: redMax,
}

// reduction calls f with the reduction of the operation, which scales too.
func (b *backend) reduction(f func(op C.int) error) error {
	s, op := b.op.Scaling, reductions[b.op.Op]
	factor := s.Pre * s.Post
	switch {
	case s.Divisor > 1 || s.Pre == 1 && s.Post == 1/float64(b.n):
		return f(redAvg)
	case factor == 1:
		return f(op)
	}
	op, err := b.comm.preMulSum(b.op.DType, factor)
	if err != nil {
		return err
	}
	return errors.Join(f(op), b.comm.destroyOp(op))
}

func (b *backend) reduce() error {
	in, out, err := b.pack()
	if err != nil {
		return err
	}
	return b.comm.use(func() error {
		return b.reduction(func(op C.int) error {
			if b.op.Kind == message.Reduce {
				return b.comm.reduce(in, out, b.op.DType, op, b.op.Root)
			}
			return b.comm.allReduce(in, out, b.op.DType, op)
		})
	})
}

// tensor returns the tensor of an operation that is no allreduce or reduce. If this rank has joined, both
// buffers are nil.
func (b *backend) tensor() ops.Tensor {
	if len(b.op.Tensors) == 0 {
		return ops.Tensor{}
	}
	return b.op.Tensors[0]
}

// blocks calls f with the block of each rank in buf.
func (b *backend) blocks(buf []byte, f func(rank int, block []byte) error) error {
	for i, n := range b.op.Counts {
		if err := f(i, buf[:n]); err != nil {
			return err
		}
		buf = buf[n:]
	}
	return nil
}

// equal reports whether the blocks of all ranks have the same size.
func (b *backend) equal() bool {
	return !slices.ContainsFunc(b.op.Counts, func(n int64) bool { return n != b.op.Counts[0] })
}

func (b *backend) reduceScatter() (err error) {
	t := b.tensor()
	if t.In == nil {
		if t.In, err = b.neutral(b.part.NumBytes); err != nil {
			return err
		}
		// The result goes to the place that NCCL allows, and nobody reads it.
		t.Out = t.In[sum(b.op.Counts[:b.me]):][:b.op.Counts[b.me]]
	}
	return b.comm.use(func() error {
		return b.reduction(func(op C.int) error {
			if b.equal() {
				return b.comm.reduceScatter(t.In, t.Out, b.op.DType, op)
			}
			return b.comm.group(func() error {
				return b.blocks(t.In, func(i int, block []byte) error {
					return b.comm.reduce(block, t.Out, b.op.DType, op, i)
				})
			})
		})
	})
}

func (b *backend) allGather() (err error) {
	t := b.tensor()
	if t.Out == nil {
		if t.Out, err = b.device.buffer(int(b.part.NumBytes)); err != nil {
			return err
		}
	}
	return b.comm.use(func() error {
		if b.equal() {
			return b.comm.allGather(t.In, t.Out)
		}
		return b.comm.group(func() error {
			return b.blocks(t.Out, func(i int, block []byte) error {
				if i == b.me {
					return b.comm.broadcast(t.In, block, i)
				}
				return b.comm.broadcast(block, block, i)
			})
		})
	})
}

func (b *backend) broadcast() (err error) {
	t := b.tensor()
	switch {
	case b.op.Root == b.me && t.Out == nil:
		t.Out = t.In
	case b.op.Root == b.me:
	case t.Out == nil:
		if t.Out, err = b.device.buffer(int(b.part.NumBytes)); err != nil {
			return err
		}
		fallthrough
	default:
		t.In = t.Out
	}
	return b.comm.use(func() error { return b.comm.broadcast(t.In, t.Out, b.op.Root) })
}

// exchange sends and receives the blocks of an alltoall, gather or scatter.
func (b *backend) exchange() error {
	err := b.blocks(b.tensor().In, func(i int, block []byte) error {
		if len(block) == 0 {
			return nil
		}
		return b.comm.send(block, i)
	})
	for i, at := 0, b.out; err == nil && i < b.n; i++ {
		if n := b.counts[i]; n > 0 {
			err = b.comm.recv(at[:n], i)
			at = at[n:]
		}
	}
	return err
}

// enter records for the timeline that an activity of the operation begins now.
func (b *backend) enter(a ops.Activity) {
	if b.part.Enter != nil {
		b.part.Enter(a)
	}
}

// mark makes the flight record for the timeline when the device begins the activity whose work is enqueued
// next.
func (b *backend) mark(a ops.Activity) error {
	if b.part.Enter == nil {
		return nil
	}
	e, err := b.library.Devices.Mark(b.device.Index(), b.device.stream.Handle())
	b.activities = append(b.activities, activity{a, e})
	return err
}
