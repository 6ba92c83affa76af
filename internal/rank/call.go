package rank

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Option identifies an option of an operation.
type Option uint8

// These are the options of operations.
const (
	OptName Option = iota
	OptOp
	OptInPlace
	OptShape
	OptShapes
	OptPrescale
	OptPostscale
	OptCompress
	OptErrorFeedback
	OptEmpty
	OptTimeout
	OptOver
	OptOn
	OptMembersOnly
)

func (o Option) String() string {
	return [...]string{
		"Name", "Op", "InPlace", "Shape", "Shapes", "Prescale", "Postscale", "CompressFP16 or CompressBF16",
		"ErrorFeedback", "Empty", "Timeout", "Over", "On", "MembersOnly",
	}[o]
}

// optionSet is a set of options. It has one bit for each option.
type optionSet uint16

func optionsOf(options ...Option) (s optionSet) {
	for _, o := range options {
		s |= 1 << o
	}
	return s
}

// applies has, for each kind of operation, the options that apply to it.
var applies = func() (sets [message.NumKinds]optionSet) {
	always := optionsOf(OptTimeout, OptOver, OptOn)
	moves := always | optionsOf(OptName, OptShape, OptShapes, OptInPlace)
	reduces := moves | optionsOf(OptOp, OptPrescale, OptPostscale)
	for k := range sets {
		sets[k] = always
	}
	sets[message.Allreduce] = reduces | optionsOf(OptCompress, OptErrorFeedback)
	sets[message.Reduce], sets[message.Reducescatter] = reduces, reduces
	sets[message.Allgather], sets[message.Alltoall], sets[message.Broadcast] = moves, moves, moves
	sets[message.Gather] = always | optionsOf(OptName, OptShape)
	sets[message.Scatter] = sets[message.Gather]
	sets[message.Send] = optionsOf(OptTimeout, OptOver, OptOn)
	sets[message.Recv] = sets[message.Send]
	sets[message.Barrier] |= optionsOf(OptName)
	sets[message.Join] |= optionsOf(OptEmpty)
	sets[message.AddProcessSet] |= optionsOf(OptName, OptMembersOnly)
	return sets
}()

// Call describes an operation and its options, as the caller gave them.
type Call struct {
	Kind                message.Kind
	DType               tensor.DType
	Name                string
	Rank                *Rank
	Set                 *Set // the process set; nil stands for the set of all ranks until Check sets it
	Op                  tensor.ReduceOp
	Prescale, Postscale float64
	Wire                tensor.DType
	InPlace             bool
	ErrorFeedback       bool
	Empty               bool
	MembersOnly         bool          // whether only the members of a process set add it
	Hold                bool          // whether the name stays in use until the caller releases it
	Timeout             time.Duration // 0 stands for the timeout of the settings until Check sets it

	number int64 // in the name, if ensureName has generated it
}

// NewCall returns a call with default options. kind is the kind of its operation, and dt is the type of its
// elements.
func NewCall(kind message.Kind, dt tensor.DType) Call {
	c := Call{Kind: kind, DType: dt}
	if kind.Reduces() {
		c.Op, c.Prescale, c.Postscale = tensor.Average, 1, 1
	}
	return c
}

// OnDevice returns the error of a call at r that cannot mark a stream because of err. If CUDA has failed, the
// call is not to blame, and r fails: the other ranks may wait for r in this operation, and a later call of
// the program must not take its place.
func (c *Call) OnDevice(r *Rank, err error) error {
	if _, failed := errors.AsType[*cuda.Error](err); !failed {
		return c.Misuse("%w", err)
	}
	err = &engine.OpError{Op: c.Kind.String(), Tensor: c.Name, Err: err}
	r.Engine.Fail(err)
	return err
}

// Misuse returns the error of a call that is refused before it reaches the engine.
func (c *Call) Misuse(format string, args ...any) error {
	return &engine.UsageError{Op: c.Kind.String(), Tensor: c.Name, Err: fmt.Errorf(format, args...)}
}

// CheckOption returns an error if option o does not apply to the operation of c.
func (c *Call) CheckOption(o Option) error {
	if applies[c.Kind]>>o&1 == 0 {
		return c.Misuse("option %v does not apply to this operation", o)
	}
	return nil
}

// Check checks the combination of options and sets each option that was not given to its default.
func (c *Call) Check() error {
	if c.Set == nil {
		c.Set = c.Rank.Global
	}
	switch {
	case c.Set.Me < 0:
		return c.Misuse("rank %d is not a member of %v", c.Rank.Place.Rank, c.Set)
	case c.ErrorFeedback && !c.Wire.Valid():
		return c.Misuse("option ErrorFeedback needs option CompressFP16 or CompressBF16")
	case c.ErrorFeedback && c.Op != tensor.Sum && !c.Op.IsAverage():
		return c.Misuse("option ErrorFeedback: got reduction %v, want sum or average", c.Op)
	case c.ErrorFeedback && c.Name == "":
		return c.Misuse("option ErrorFeedback needs option Name: the rounding error of a tensor is added to the next tensor of the same name")
	case c.Set.joined.Load() && c.Kind != message.Join:
		return c.Misuse("this rank has joined %v: wait for the join to end", c.Set)
	}
	if c.Timeout == 0 && c.Kind != message.Join {
		c.Timeout = c.Rank.timeout
	}
	return nil
}

// CheckRoot returns an error if root is not a member of the process set of c.
func (c *Call) CheckRoot(root int) error { return c.CheckMember(root, "root rank") }

// CheckMember returns an error if rank is not a member of the process set of c. The argument what says in the
// error what the rank is.
func (c *Call) CheckMember(rank int, what string) error {
	if _, ok := slices.BinarySearch(c.Set.Ranks, topo.Rank(rank)); !ok {
		return c.Misuse("got %s %d, want a rank of %v", what, rank, c.Set)
	}
	return nil
}

// Splits checks and returns splits, which has the number of rows that each member gets from this rank in an
// alltoall or a scatter. If splits is nil, every member gets the same number of rows.
func Splits[N int | int64](c *Call, splits []N, rows int64) ([]int64, error) {
	n := c.Set.Size()
	given := make([]int64, n)
	if splits == nil {
		if rows%int64(n) != 0 {
			return nil, c.Misuse("got %d rows, which cannot be split evenly between %d ranks: pass splits",
				rows, n)
		}
		for i := range given {
			given[i] = rows / int64(n)
		}
		return given, nil
	}
	if len(splits) != n {
		return nil, c.Misuse("got %d splits, want one for each of %d ranks", len(splits), n)
	}
	left := rows
	for i, s := range splits {
		if s < 0 || int64(s) > left {
			return nil, c.Misuse(
				"got splits %v, want non-negative numbers with a sum of at most %d, the number of rows",
				splits, rows)
		}
		left -= int64(s)
		given[i] = int64(s)
	}
	return given, nil
}

// SplitsTo returns the splits of a rank that sends all its rows to the given root.
func SplitsTo(c *Call, root int, rows int64) []int64 {
	splits := make([]int64, c.Set.Size())
	splits[slices.Index(c.Set.Ranks, topo.Rank(root))] = rows
	return splits
}

// PrepareScatter completes the scatter e, whose request has a root and this rank's shape. At the root it sets
// the splits. The other ranks send nothing, so it removes their shape.
func PrepareScatter[N int | int64](c *Call, e *tensorqueue.Entry, splits []N) (err error) {
	q := &e.Request
	if !c.Set.IsRoot(int(q.Root)) {
		q.Shape = nil
		return nil
	}
	if len(q.Shape) == 0 {
		return c.Misuse("a scalar has no rows")
	}
	e.Splits, err = Splits(c, splits, q.Shape[0])
	return err
}

// Fill sets the fields of e that have the same values in all entries of the call c.
func (c *Call) Fill(e *tensorqueue.Entry) {
	e.Set, e.Timeout, e.Hold, e.InPlace, e.ErrorFeedback = c.Set.ID, c.Timeout, c.Hold, c.InPlace,
		c.ErrorFeedback
	q := &e.Request
	q.Kind, q.DType, q.Op, q.Prescale, q.Postscale, q.Wire = c.Kind, c.DType, c.Op, c.Prescale, c.Postscale,
		c.Wire
}

// Submit queues e, which is an operation on one tensor, or a group that is one request. If the caller gave no
// name, Submit generates one. Afterwards the caller must call Drive, Notify or NotifyLater of the engine.
func (c *Call) Submit(e *tensorqueue.Entry) error {
	// Check the parameters before ensureName counts the call, because a call that fails only at this rank
	// must not change the generated names of later calls.
	if err := e.Request.CheckParameters(); err != nil {
		return c.Misuse("%w", err)
	}
	if err := c.ensureName(); err != nil {
		return err
	}
	e.Request.Name = c.Name
	return c.queue(e)
}

// SubmitMembers names and queues the entries of a group that has one request for each tensor. The name of a
// tensor consists of the name of c and the tensor's position in the group.
func (c *Call) SubmitMembers(entries []*tensorqueue.Entry) error {
	for _, e := range entries {
		// Check the parameters before ensureName, for the same reason as in Submit.
		if err := e.Request.CheckParameters(); err != nil {
			return c.Misuse("%w", err)
		}
	}
	if err := c.ensureName(); err != nil {
		return err
	}
	names := memberNames(c.Name, len(entries))
	// Checking the last name is enough, because it is the longest.
	if err := message.CheckName(names[len(names)-1]); err != nil {
		return c.Misuse("%w", err)
	}
	for i, name := range names {
		q := &entries[i].Request
		q.Name = name
		if len(entries) > 1 {
			q.Group, q.GroupSize = c.Name, int32(len(entries))
		}
	}
	return c.queue(entries...)
}

// memberNames returns the names of the n tensors of a group. To save allocations, all names are parts of one
// string.
func memberNames(group string, n int) []string {
	var text []byte
	ends := make([]int, n)
	for i := range n {
		text = append(append(text, group...), '_')
		text = strconv.AppendInt(text, int64(i+1), 10)
		text = strconv.AppendInt(append(text, "of"...), int64(n), 10)
		ends[i] = len(text)
	}
	all, names, begin := string(text), make([]string, n), 0
	for i, end := range ends {
		names[i], begin = all[begin:end], end
	}
	return names
}

// ensureName generates a name if the caller gave none. All members of a set must make unnamed calls of an
// operation in the same order, so that they generate the same names.
func (c *Call) ensureName() error {
	if c.Name == "" {
		name := append([]byte(c.Kind.String()), ".noname."...)
		c.number = c.Set.unnamed[c.Kind].Add(1)
		c.Name = string(strconv.AppendInt(name, c.number, 10))
	}
	if err := message.CheckName(c.Name); err != nil {
		return &engine.UsageError{Op: c.Kind.String(), Err: err} // without the name, which may be very long
	}
	return nil
}

// checkAndQueue checks and queues e. The request of e already has a name.
func (c *Call) checkAndQueue(e *tensorqueue.Entry) error {
	if err := e.Request.Check(); err != nil {
		return c.Misuse("%w", err)
	}
	return c.queue(e)
}

// queue passes entries to the engine. If the engine refuses them because of a mistake in this call, queue
// returns a *engine.UsageError.
func (c *Call) queue(entries ...*tensorqueue.Entry) error {
	if d := entries[0].Request.Device; d != tensor.Host {
		c.Rank.lastDevice.Store(int32(d))
	}
	err := c.Rank.queue(entries)
	if err == nil {
		return nil
	}
	var (
		duplicate *tensorqueue.DuplicateNameError
		op        *engine.OpError
	)
	inUse := errors.As(err, &duplicate)
	// As in Submit, the next call gets the number, unless the program uses the name.
	if c.number > 0 && !inUse {
		c.Set.unnamed[c.Kind].CompareAndSwap(c.number, c.number-1)
	}
	if errors.As(err, &op) && (inUse || errors.Is(err, engine.ErrNoProcessSet)) {
		return &engine.UsageError{Op: op.Op, Tensor: op.Tensor, Err: op.Err}
	}
	return err
}

// JoinName is the name of every join. A rank can have only one join of a process set in flight, so one name
// suffices.
const JoinName = "join.noname"

// Join queues e as a join. It calls done when the join has ended. The rank counts as joined until the caller
// calls Set.Release.
func (c *Call) Join(e *tensorqueue.Entry, done func(error)) error {
	c.Name = JoinName
	*e = tensorqueue.Entry{
		Set: c.Set.ID, Timeout: c.Timeout, Done: done,
		Request: message.Request{Kind: message.Join, Name: c.Name, Empty: c.Empty,
			Device: tensor.Device(c.Rank.lastDevice.Load())},
	}
	if !c.Set.joined.CompareAndSwap(false, true) {
		return c.Misuse("this rank has joined %v already", c.Set)
	}
	if err := c.checkAndQueue(e); err != nil {
		c.Set.joined.Store(false)
		return err
	}
	return nil
}

// OnlyBools sets each byte of b that is neither 0 nor 1 to 1, because other values are invalid in a Go bool.
// Other ranks may have sent such values.
func OnlyBools(b []byte) {
	for i, v := range b {
		if v > 1 {
			b[i] = 1
		}
	}
}
