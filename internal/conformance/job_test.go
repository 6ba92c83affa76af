package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
)

// what has those parameters of an operation that do not depend on its data.
type what struct {
	kind message.Kind
	// uneven is set for an alltoall or a scatter in which the number of rows differs from member to member.
	uneven bool
	reduction
}

func (w what) String() string {
	s := w.kind.String()
	if w.uneven {
		s += " uneven"
	}
	if w.dt.Valid() {
		s += " " + w.dt.String()
	}
	if w.kind.Reduces() {
		s += fmt.Sprintf(" %v ×%v ×%v", w.op, w.pre, w.post)
	}
	if w.wire.Valid() {
		s += " as " + w.wire.String()
	}
	return s
}

// job is one operation of a process set. It has the input of each member and computes the correct result.
type job struct {
	what
	name     string
	set      topo.ProcessSetID
	members  []topo.Rank
	elements int // the approximate number of elements per member
	seed     uint64
	lead     uint64 // determines which member is the root
	wild     bool
	inPlace  bool
	// joined has the members that joined before the operation. Bit i stands for member i. If empty is set,
	// these members submit empty tensors.
	joined uint
	empty  bool
	// memory has the tensors of the member in this process. It is nil if they are in host memory.
	memory memory
	// apart is the member whose tensor is in host memory while those of the other members are on devices. It
	// is -1 if there is no such member. It has no effect without memory.
	apart int

	same agreement // checks that results are the same for all members
	// digest, if not nil, gets the results that must be the same for all members. It is for members that are
	// in different processes.
	digest io.Writer
}

func (j *job) String() string {
	return fmt.Sprintf("%v %q of %d elements, set %v, in place %v, wild %v, joined %b empty %v, seed %d",
		j.what, j.name, j.elements, j.members, j.inPlace, j.wild, j.joined, j.empty, j.seed)
}

// agreement checks that all members have the same bytes. The first call of check sets the bytes, and later
// calls compare with them.
type agreement struct {
	mu    sync.Mutex
	first []byte
	set   bool
}

func (a *agreement) check(b []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.set {
		a.first, a.set = bytes.Clone(b), true
	}
	if !bytes.Equal(a.first, b) {
		return errors.New("members have different bits, want the same bits at all members")
	}
	return nil
}

func (j *job) absent(m int) bool { return j.joined>>m&1 == 1 }

// active returns the positions of the members that have not joined.
func (j *job) active() (all []int) {
	for m := range j.members {
		if !j.absent(m) {
			all = append(all, m)
		}
	}
	return all
}

// memory is memory of a device for the tensors of a rank.
type memory interface {
	// place copies the input of op to the device and allocates its output there, which has the given number
	// of bytes. The input is the part of the output that begins at the byte with index in, or the output is
	// the part of the input that begins at the byte with index out. Both are -1 if they do not overlap.
	place(op *testcluster.Op, outBytes, in, out int) error
	// fetch copies the input and the output of op to host memory, frees the memory of the device and stores
	// the copies in op.
	fetch(op *testcluster.Op) error
	// join sets the device of op, which is a join.
	join(op *testcluster.Op)
}

// mixed reports whether one member has its tensor in host memory and another one on a device.
func (j *job) mixed() bool {
	return j.memory != nil && j.apart >= 0 && j.kind.MovesData() && !j.absent(j.apart) && len(j.active()) > 1
}

// root returns the position of the root of the operation, which is a member that has not joined.
func (j *job) root() int {
	all := j.active()
	return all[j.lead%uint64(len(all))]
}

// width returns the number of elements in a row.
func (j *job) width() int {
	switch {
	case j.elements == 0 && j.uneven && !j.device:
		return 0 // no row has an element, so only the number of rows matters
	case j.elements%4 == 0:
		return 4
	default:
		return 1
	}
}

// rows returns the number of rows of member m's tensor.
func (j *job) rows(m int) int {
	width, n := j.width(), len(j.members)
	if width == 0 {
		return 5
	}
	rows := j.elements / width
	switch {
	case j.kind == message.Allgather && !j.inPlace, j.kind == message.Gather:
		return rows >> (m % 3)
	case j.kind == message.Alltoall && !j.uneven:
		return rows - rows%n
	default:
		return rows
	}
}

func (j *job) shape(m int) tensor.Shape { return tensor.Shape{int64(j.rows(m)), int64(j.width())} }

// input returns the input of member m. The caller must not change the bytes.
func (j *job) input(m int) []byte {
	elements := j.rows(m) * j.width()
	s := source{dt: j.dt, op: j.op, seed: j.seed, wild: j.wild}.normal()
	return inputs.get(inputKey{s, m, elements}, func() []byte { return s.bytes(m, elements) })
}

// splits returns the number of rows that member m sends to each member in an alltoall.
func (j *job) splits(m int) []int {
	n, left := len(j.members), j.rows(m)
	each, more := left/n, left%n
	if n > 1 {
		more += each / 2
	}
	splits := make([]int, n)
	for i := range splits {
		switch k := (m + i) % n; {
		case !j.uneven:
			splits[i] = each
		case !j.inPlace: // some rows are not sent to any member
			splits[i] = int(hash(j.seed, uint64(m), uint64(i)) % uint64(left/2+1))
			left -= splits[i]
		case k == 0: // in place, every member must receive as many rows as it sends
			splits[i] = each + more
		case k == 1:
			splits[i] = each - each/2
		default:
			splits[i] = each
		}
	}
	return splits
}

// scatterSplits returns the number of rows that the root sends to each member in a scatter.
func (j *job) scatterSplits() (splits []int64) {
	left := j.rows(j.root())
	for i := range j.members {
		n := int(hash(j.seed, uint64(i)) % uint64(left/2+1))
		splits, left = append(splits, int64(n)), left-n
	}
	return splits
}

// submission returns the operation that r submits for the job. r must be a member that has not joined.
func (j *job) submission(r *testcluster.Rank) *testcluster.Op {
	m := slices.Index(j.members, r.Rank)
	input := bytes.Clone(j.input(m))
	var op *testcluster.Op
	switch j.kind {
	case message.Barrier:
		op = testcluster.Barrier(j.name)
	case message.Join:
		op = testcluster.Join(j.name)
	case message.Allreduce:
		op = testcluster.Allreduce(j.name, j.dt, j.shape(m), j.op, input)
	case message.Reducescatter:
		op = testcluster.Reducescatter(j.name, j.dt, j.shape(m), j.op, input)
	case message.Reduce:
		op = testcluster.Reduce(j.name, j.dt, j.shape(m), j.op, j.members[j.root()], input)
	case message.Allgather:
		op = testcluster.Allgather(j.name, j.dt, j.shape(m), input)
	case message.Broadcast:
		op = testcluster.Broadcast(j.name, j.dt, j.shape(m), j.members[j.root()], input)
	case message.Gather:
		op = testcluster.Gather(j.name, j.dt, j.shape(m), j.members[j.root()], input)
	case message.Scatter:
		root := j.members[j.root()]
		op = testcluster.Scatter(j.name, j.dt, nil, nil, root, nil)
		if m == j.root() {
			splits := j.scatterSplits()
			op = testcluster.Scatter(j.name, j.dt, j.shape(m), splits, root, input)
		}
	case message.Alltoall:
		var splits []int64
		for _, s := range j.splits(m) {
			splits = append(splits, int64(s))
		}
		if !j.uneven {
			splits = nil
		}
		op = testcluster.Alltoall(j.name, j.dt, j.shape(m), splits, input)
	}
	if j.kind.Reduces() {
		op.Request.Prescale, op.Request.Postscale, op.Request.Wire = j.pre, j.post, j.wire
	}
	testcluster.Over(j.set, op)
	switch {
	case j.memory != nil && j.kind == message.Join:
		j.memory.join(op)
	case j.memory != nil && j.kind.MovesData() && !(j.mixed() && m == j.apart):
		r.Must(j.place(m, op))
	case j.inPlace:
		op.InPlace(r)
	}
	return op
}

// place moves the tensors of op, which member m will submit, to the device.
func (j *job) place(m int, op *testcluster.Op) error {
	outBytes, in, out := 0, -1, -1
	switch size := len(op.Input); j.kind {
	case message.Reducescatter:
		from, to := j.part(m)
		if outBytes = (to - from) * j.dt.Size(); j.inPlace {
			out = from * j.dt.Size()
		}
	case message.Reduce, message.Allreduce:
		if j.kind == message.Allreduce || m == j.root() {
			outBytes = size
		}
		if j.inPlace && outBytes == size {
			out = 0
		}
	default:
		result, _ := j.moved(m)
		switch outBytes = len(result); {
		case j.inPlace && j.kind == message.Broadcast:
			out = 0
		case j.inPlace && j.kind == message.Allgather:
			in = 0
			for _, i := range j.active() {
				if i < m {
					in += len(j.input(i))
				}
			}
		}
	}
	return j.memory.place(op, outBytes, in, out)
}

// check compares the result of op with the reference. op is the operation that r has submitted.
func (j *job) check(r *testcluster.Rank, op *testcluster.Op) error {
	if err := j.checkResult(slices.Index(j.members, r.Rank), op); err != nil {
		return fmt.Errorf("%v: %w", j, err)
	}
	return nil
}

func (j *job) checkResult(m int, op *testcluster.Op) error {
	if j.memory != nil && op.Request.Device != tensor.Host && j.kind.MovesData() {
		if err := j.memory.fetch(op); err != nil {
			return err
		}
	}
	if refusal := j.refusal(m); refusal != "" {
		var mismatch *engine.MismatchError
		if !errors.As(op.Err, &mismatch) {
			return fmt.Errorf("got error %v, want a refusal: %s", op.Err, refusal)
		}
		if text := mismatch.Error(); refusal == mixedMemory && j.joined == 0 &&
			!(strings.Contains(text, fmt.Sprintf("rank %d sent a tensor in host memory", j.members[j.apart])) &&
				strings.Contains(text, "sent a tensor on a CUDA device")) {
			return fmt.Errorf("got error %q, want one that says that the tensor of rank %d is in host memory",
				text, j.members[j.apart])
		}
		return nil
	}
	if op.Err != nil {
		return op.Err
	}
	switch j.kind {
	case message.Barrier:
		return nil
	case message.Join:
		return j.checkLast(op)
	case message.Allgather, message.Broadcast, message.Alltoall, message.Gather, message.Scatter:
		return j.checkMoved(m, op)
	case message.Allreduce:
		if err := j.same.check(op.Output); err != nil {
			return err
		}
		if j.digest != nil {
			_, _ = j.digest.Write(op.Output) // a hash never fails
		}
	}
	if j.kind == message.Reduce && m != j.root() {
		return j.checkUntouched(m, op)
	}
	return j.checkReduced(m, op.Output)
}

// checkUntouched checks that a reduce has changed nothing at member m, which is not the root.
func (j *job) checkUntouched(m int, op *testcluster.Op) error {
	if op.Output != nil || !bytes.Equal(op.Input, j.input(m)) {
		return fmt.Errorf("got an output of %d bytes and input %x, want no output and input %x",
			len(op.Output), clip(op.Input), clip(j.input(m)))
	}
	return nil
}

// refusal returns the reason for the error that member m must get, or "" if it must not get an error.
func (j *job) refusal(m int) string {
	neutral := j.kind == message.Allreduce || j.kind == message.Reduce
	if j.joined != 0 && !j.empty && j.kind.MovesData() && !neutral {
		return "members have joined"
	}
	if j.mixed() {
		return mixedMemory
	}
	if !j.device && j.inPlace && (j.kind == message.Allgather || j.kind == message.Alltoall) {
		room := len(j.input(m))
		if j.kind == message.Allgather {
			room *= len(j.members)
		}
		if want, _ := j.moved(m); len(want) != room {
			return "in place there is other room"
		}
	}
	return ""
}

const mixedMemory = "one tensor is in host memory"

func (j *job) checkLast(op *testcluster.Op) error {
	if !slices.Contains(j.members, op.Last()) {
		return fmt.Errorf("rank %d joined last", op.Last())
	}
	return j.same.check([]byte(fmt.Sprint(op.Last())))
}

// moved returns the correct result of member m for an operation that moves elements without reducing them.
// For an alltoall it also returns how many rows member m receives from each member.
func (j *job) moved(m int) (out []byte, received []int64) {
	switch j.kind {
	case message.Broadcast:
		return j.input(j.root()), nil
	case message.Allgather:
		for _, i := range j.active() {
			out = append(out, j.input(i)...)
		}
		return out, nil
	}
	row := j.width() * j.dt.Size()
	if j.kind == message.Gather {
		return j.gathered(m)
	}
	if j.kind == message.Scatter {
		return j.scattered(m, row)
	}
	received = make([]int64, len(j.members))
	for _, i := range j.active() {
		splits := j.splits(i)
		first := 0
		for _, s := range splits[:m] {
			first += s
		}
		out = append(out, j.input(i)[first*row:][:splits[m]*row]...)
		received[i] = int64(splits[m])
	}
	return out, received
}

// gathered returns the correct result of member m for a gather.
func (j *job) gathered(m int) (out []byte, received []int64) {
	received = make([]int64, len(j.members))
	if m == j.root() {
		for _, i := range j.active() {
			out, received[i] = append(out, j.input(i)...), int64(j.rows(i))
		}
	}
	return out, received
}

// scattered returns the correct result of member m for a scatter of rows of the given number of bytes.
func (j *job) scattered(m, row int) (out []byte, received []int64) {
	splits, first := j.scatterSplits(), 0
	for _, s := range splits[:m] {
		first += int(s)
	}
	received = make([]int64, len(j.members))
	received[j.root()] = splits[m]
	return j.input(j.root())[first*row:][:int(splits[m])*row], received
}

func (j *job) checkMoved(m int, op *testcluster.Op) error {
	want, received := j.moved(m)
	if !slices.Equal(op.Received, received) {
		return fmt.Errorf("got %v rows, want %v", op.Received, received)
	}
	if len(op.Output) != len(want) {
		return fmt.Errorf("got %d bytes, want %d", len(op.Output), len(want))
	}
	for i := range want {
		if op.Output[i] != want[i] {
			return fmt.Errorf("byte %d is %#x, want %#x", i, op.Output[i], want[i])
		}
	}
	return nil
}

// reduced is the reference result of a reduction. Either the field for integers or the field for floats is
// set.
type reduced struct {
	ints   []int64
	floats []interval
}

func (j *job) checkReduced(m int, out []byte) error {
	want := j.result()
	from, to := 0, j.rows(m)*j.width()
	if j.kind == message.Reducescatter {
		from, to = j.part(m)
	}
	if len(out) != (to-from)*j.dt.Size() {
		return fmt.Errorf("got %d bytes, want %d elements", len(out), to-from)
	}
	if want.ints != nil {
		for i, x := range decodeInts(j.dt, out) {
			if x != want.ints[from+i] {
				return fmt.Errorf("element %d of %d is %d, want %d", i, to-from, x, want.ints[from+i])
			}
		}
		return nil
	}
	for i, x := range decodeFloats(j.dt, out) {
		if !want.floats[from+i].has(x) {
			return fmt.Errorf("element %d of %d is %v, want %v", i, to-from, x, want.floats[from+i])
		}
	}
	return nil
}

// part returns the range of elements that member m gets from a reducescatter. If the rows do not divide
// evenly, each of the first members gets one row more.
func (j *job) part(m int) (from, to int) {
	n, rows := len(j.members), j.rows(m)
	for i := range m + 1 {
		from = to
		to += rows / n
		if i < rows%n {
			to++
		}
	}
	return from * j.width(), to * j.width()
}

// reduce computes the reference result for all elements.
func (j *job) reduce() reduced {
	n := len(j.members)
	elements := j.rows(0) * j.width()
	switch {
	case j.op == tensor.Adasum:
		in := make([][]float64, n)
		for _, m := range j.active() {
			in[m] = decodeFloats(j.dt, j.input(m))
		}
		return reduced{floats: j.adasum(in, elements)}
	case j.dt.IsFloat():
		var in [][]float64
		for _, m := range j.active() {
			in = append(in, decodeFloats(j.dt, j.input(m)))
		}
		if j.byNCCL() {
			return reduced{floats: j.floatsOnDevice(in, n)}
		}
		return reduced{floats: j.floats(in, n)}
	default:
		var in [][]int64
		for _, m := range j.active() {
			in = append(in, decodeInts(j.dt, j.input(m)))
		}
		return reduced{ints: j.ints(in, n)}
	}
}

// These caches have recent inputs and results of reductions, because many jobs have the same data and differ
// only in how they run.
var (
	inputs  memo[inputKey, []byte]
	results memo[resultKey, reduced]
)

// inputKey has the parameters on which the input of a member depends.
type inputKey struct {
	source
	member, elements int
}

// resultKey has the parameters on which the result of a reduction depends.
type resultKey struct {
	reduction
	elements, members int
	joined            uint
	seed              uint64
	wild              bool
}

// result returns the reference result of the reduction, which it computes only if the cache does not have it.
func (j *job) result() reduced {
	key := resultKey{j.reduction, j.rows(0) * j.width(), len(j.members), j.joined, j.seed, j.wild}
	return results.get(key, j.reduce)
}

// memo caches up to 100 computed values. If several goroutines need the same value, one of them computes it
// and the others wait for it.
type memo[K comparable, V any] struct {
	mu  sync.Mutex
	all map[K]func() V
}

func (m *memo[K, V]) get(key K, compute func() V) V {
	const most = 100
	m.mu.Lock()
	known := m.all[key]
	if known == nil {
		if m.all == nil || len(m.all) >= most {
			m.all = make(map[K]func() V)
		}
		known = sync.OnceValue(compute)
		m.all[key] = known
	}
	m.mu.Unlock()
	return known()
}

// joiners returns the members that join, as bits. They are the first or the last member and, if there are
// more than three members, also the second. In a set with one member, no member joins.
func joiners(members int, which uint64) uint {
	if members == 1 {
		return 0
	}
	all := uint(1) << ((members - 1) * int(which%2))
	if members > 3 {
		all |= 1 << 1
	}
	return all
}
