package ps

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// maxUnapplied and maxUnappliedBytes bound the messages that the other server of a range has not applied
	// yet. While there are more, the pushes of workers wait, except for one of each worker.
	maxUnapplied      = 1 << 10
	maxUnappliedBytes = 64 << 20
	// pieceBytes is the size of the messages with which a server that returns gets the values of a range. So
	// many of them are sent together as maxPieces says.
	pieceBytes = 1 << 20
	maxPieces  = 8
	// timePerByte is the time that the other server has to receive and apply a byte of a message, besides
	// PS_HEARTBEAT_TIMEOUT: 10 MB/s.
	timePerByte = 100 * time.Nanosecond
)

// replicaRole says what a server does for a range of keys.
type replicaRole uint8

const (
	// joining: it does not have all values yet, and gets them from the primary.
	joining replicaRole = iota
	// backup: it has all values that the primary has acknowledged.
	backup
	// primary: it answers the workers.
	primary
)

// replica is what a server has of the range of keys of an app: the values, and which pushes were applied. Two
// servers have each range (docs/ps.md, Replicas).
//
// Invariants:
//
//  1. At most one of the two servers is the primary. A server becomes it only if the primary says so (TAKE),
//     or if the scheduler says that the primary has ended.
//  2. The primary answers a push when the backup has applied it. It stops to wait only if the scheduler says
//     that the backup has ended.
//  3. A server applies the messages of the other one in the order of their numbers.
type replica struct {
	po   *postoffice
	app  int
	home int // rank of the server in whose range the keys are
	// empty returns a store without values.
	empty func() *store

	mu    sync.Mutex
	store *store
	role  replicaRole
	// lost says that values of the range were lost: both servers have ended.
	lost   bool
	closed bool
	// partner is the process of the other server that this one knows. ended says that it has ended.
	partner van.Process
	ended   bool
	asked   bool // SYNC was sent, while joining
	applied map[senderKey]*window
	out     *outStream    // nil if the partner gets nothing
	in      *inStream     // nil if nothing is expected from the partner
	room    chan struct{} // closed when pushes need not wait any longer; nil if none waits
	// lastLag is what lag has found last.
	lastLag atomic.Pointer[lag]
}

// lag says what the partner has not applied.
type lag struct {
	unreplicated    bool // the partner does not have the range
	partner         int
	messages, bytes int
}

// window says which pushes of a customer of a worker were applied: all that count up to completed, because
// the worker has their answers, and some later ones.
type window struct {
	completed int64
	applied   map[int64]struct{}
}

// fresh reports whether a push was not applied yet. completed is the last request up to which all of the
// customer have completed.
func (w *window) fresh(completed, timestamp int64) (bool, error) {
	if completed > w.completed+int64(len(w.applied)) {
		maps.DeleteFunc(w.applied, func(t int64, _ struct{}) bool { return t <= completed })
		w.completed = completed
	}
	for ; w.completed < completed; w.completed++ {
		delete(w.applied, w.completed+1)
	}
	if timestamp > w.completed+maxOutstanding {
		return false, fmt.Errorf("malformed push: it is request %d, but request %d has not completed",
			timestamp, w.completed+1)
	}
	_, known := w.applied[timestamp]
	return timestamp > w.completed && !known, nil
}

// outStream has the messages from this server to the partner that were not applied there.
type outStream struct {
	// synced says that the partner is a backup as soon as it has applied everything. Until then it gets the
	// values: at is the next one, and complete the number of the message COMPLETE.
	synced   bool
	at       position
	piece    uint64 // number of the last message with values
	complete uint64

	next, applied uint64 // numbers of the last message and the last one that was applied
	sizes         []int  // of the messages that were not applied
	bytes         int    // sum of sizes
	progress      time.Time
	waiting       []waiter
	waitingBytes  int          // size of the answers that wait
	lists         *serverLists // lists of keys that the partner knows
	list          uint64       // number of lists so far
}

// waiter is an answer that is sent when the partner has applied the message with the given number.
type waiter struct {
	number uint64
	bytes  int
	answer func()
}

// inStream has the state of the messages from the partner to this server.
type inStream struct {
	next   uint64                  // number of the last message that was applied
	early  map[uint64]*van.Message // messages that have overtaken others
	lists  *serverLists
	broken bool // a message could not be applied
}

func newInStream() *inStream {
	return &inStream{early: make(map[uint64]*van.Message), lists: newServerLists()}
}

func newOutStream(synced bool) *outStream {
	return &outStream{synced: synced, lists: newServerLists()}
}

// otherServer returns the id of the other server that has the range of a server with replicas: for the first
// of both the second, and the reverse.
func (p *postoffice) otherServer(home, id int) int {
	first, second := van.ServerID(home), van.ServerID((home+1)%p.cfg.NumServers)
	if id == first {
		return second
	}
	return first
}

// route returns the id of the server to which a request for a range goes: the preferred one of the two that
// have it, or otherwise the other one. It returns 0 if this process is connected with neither. If there is no
// preferred one, that is the one whose range it is.
func (p *postoffice) route(home, preferred int) int {
	preferred = cmp.Or(preferred, van.ServerID(home))
	for _, id := range []int{preferred, p.otherServer(home, preferred)} {
		if p.van.Connected(p.van.Current(id)) {
			return id
		}
	}
	return 0
}

// newReplica returns what this server has of a range at the begin. Of two processes, the older one has the
// values, and the other one gets them. If both have started with the job, there are none yet.
func newReplica(po *postoffice, app, home int, empty func() *store) *replica {
	r := &replica{po: po, app: app, home: home, empty: empty, store: empty(), role: primary,
		applied: make(map[senderKey]*window)}
	own := po.van.Process()
	r.partner = po.van.Current(po.otherServer(home, own.ID))
	ownSince, since := po.van.Since(own.ID), po.van.Since(r.partner.ID)
	r.ended = po.van.Ended(r.partner) // last, so that since is that of the partner, unless it has ended
	switch {
	case r.ended || since > ownSince:
		r.lost = ownSince > 0
	case since < ownSince:
		r.role, r.in = joining, newInStream()
		po.joining[van.Rank(r.partner.ID)].Add(1)
	case own.ID == van.ServerID(home):
		r.out = newOutStream(true)
	default:
		r.role, r.in = backup, newInStream()
	}
	r.measureLag()
	return r
}

// serves reports whether this server answers requests for the range.
func (r *replica) serves() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.role == primary && !r.closed
}

// news does what follows from the state of the partner, and forgets workers that have ended.
func (r *replica) news() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refresh()
}

// refresh does what news does, for a caller that holds mu.
func (r *replica) refresh() {
	r.follow()
	maps.DeleteFunc(r.applied, func(key senderKey, _ *window) bool { return r.po.van.Ended(key.process) })
}

// follow does what follows from the state of the partner. The caller holds mu.
func (r *replica) follow() {
	v := r.po.van
	if r.closed {
		return
	}
	for ; ; r.ended = false {
		if !r.ended && v.Ended(r.partner) {
			r.ended = true
			r.alone()
		}
		now := v.Current(r.partner.ID)
		if now.Generation <= r.partner.Generation {
			break
		}
		r.partner = now
	}
	if r.role == joining && !r.asked && v.Connected(r.partner) {
		r.asked = true
		r.reply(&pspb.Replica{Kind: pspb.Replica_SYNC}, nil)
	}
}

// alone makes this server the primary without a backup, because the partner has ended. The caller holds mu.
func (r *replica) alone() {
	text := ""
	switch {
	case r.role == joining:
		text = "ps: the values of a range are lost: the other server has ended before this one had them"
		r.store, r.lost = r.empty(), true
		clear(r.applied)
		r.po.joining[van.Rank(r.partner.ID)].Add(-1)
	case r.role == backup:
		text = "ps: this server takes over a range, without a replica"
	case r.out != nil:
		text = "ps: this server goes on with a range without a replica"
	}
	if text != "" && !errors.Is(r.po.van.Gone(r.partner.ID), van.ErrLeft) {
		r.po.log.Warn(text, zap.Int("app", r.app), zap.Int("range", r.home),
			zap.String("ended", van.Name(r.partner.ID)))
	}
	r.role = primary
	if r.in != nil {
		r.in.drop()
		r.in = nil
	}
	r.endOut()
	r.measureLag()
}

// endOut ends the stream to the partner, and sends all answers that wait. The caller holds mu.
func (r *replica) endOut() {
	if o := r.out; o != nil {
		r.out = nil
		for _, w := range o.waiting {
			w.answer()
		}
	}
	r.hasRoom()
}

// drop frees the messages that have overtaken others.
func (in *inStream) drop() {
	for _, m := range in.early {
		m.Release()
	}
	clear(in.early)
}

// hasRoom wakes the pushes that wait. The caller holds mu.
func (r *replica) hasRoom() {
	if r.room != nil {
		close(r.room)
		r.room = nil
	}
}

// awaitRoom waits while too much was not applied by the backup.
func (r *replica) awaitRoom() {
	r.mu.Lock()
	for o := r.out; !r.closed && r.role == primary && o != nil && (len(o.sizes) >= maxUnapplied ||
		o.bytes >= maxUnappliedBytes || o.waitingBytes >= maxUnappliedBytes); o = r.out {
		if r.room == nil {
			r.room = make(chan struct{})
		}
		room := r.room
		r.mu.Unlock()
		select {
		case <-room:
		case <-r.po.van.Done():
			return
		}
		r.mu.Lock()
	}
	r.mu.Unlock()
}

// close makes the server answer no further requests.
func (r *replica) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	r.hasRoom()
}

// release frees everything, when the van has stopped.
func (r *replica) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.in != nil {
		r.in.drop()
	}
	r.endOut()
}

// tick asks the scheduler to declare a partner dead that has stopped to apply messages.
func (r *replica) tick(now time.Time) {
	if !r.mu.TryLock() {
		return // the caller sends heartbeats, which must not wait while a long push is applied
	}
	defer r.mu.Unlock()
	r.refresh()
	o, limit := r.out, r.po.cfg.HeartbeatTimeout
	if o == nil || o.applied == o.next || limit == 0 || r.closed {
		return
	}
	if limit += time.Duration(o.sizes[0]) * timePerByte; now.Sub(o.progress) < limit {
		return
	}
	o.progress = now
	r.evict(fmt.Errorf("it has applied none of %d replicated messages of app %d for %v", len(o.sizes), r.app,
		limit))
}

// evict asks the scheduler to declare the partner dead, unless this server still gets the values of a range
// from it.
func (r *replica) evict(why error) {
	if r.po.joining[van.Rank(r.partner.ID)].Load() == 0 {
		r.po.van.Evict(r.partner, why)
	}
}

// measureLag sets lastLag. It is called whenever role or out has changed, because addStats may find mu locked
// each time. The caller holds mu.
func (r *replica) measureLag() {
	l := &lag{partner: r.partner.ID,
		unreplicated: r.role == primary && (r.out == nil || !r.out.synced || r.out.applied < r.out.complete)}
	if r.out != nil {
		l.messages, l.bytes = len(r.out.sizes), r.out.bytes
	}
	r.lastLag.Store(l)
}

// addStats adds what the partner has not applied to the statistics. While a long push is applied, it adds the
// state before that, because hvdrun takes a node that does not answer soon for dead.
func (r *replica) addStats(s *trace.Node) {
	if r.mu.TryLock() {
		r.measureLag()
		r.mu.Unlock()
	}
	l := r.lastLag.Load()
	if l.unreplicated {
		s.Unreplicated++
	}
	for i := range s.Peers {
		if p := &s.Peers[i]; p.ID == l.partner {
			p.LagMessages += l.messages
			p.LagBytes += l.bytes
		}
	}
}

// makeMessage returns a message to the partner with the given frames, which must not change until free is
// called.
func (r *replica) makeMessage(about *pspb.Replica, frames ...[]byte) *van.Message {
	return &van.Message{Header: &pspb.Header{Request: true, AppId: int32(r.app), Range: int32(r.home + 1),
		Replica: about}, Data: frames}
}

// reply sends a message without a place in the stream: SYNC or APPLIED. If err is not nil, it says that a
// message could not be applied.
func (r *replica) reply(about *pspb.Replica, err error) {
	m := r.makeMessage(about)
	m.Header.Request = about.Kind == pspb.Replica_SYNC
	if err != nil {
		m.Header.Error = err.Error()
	}
	r.po.sendAnswer(r.partner, m)
}

// sendNext sends the next message of the stream to the partner. If the connection has ended, the scheduler
// will say of one of both that it has ended. The caller holds mu.
func (r *replica) sendNext(m *van.Message) {
	o := r.out
	if o.next == o.applied {
		o.progress = time.Now()
	}
	o.next++
	m.Header.Replica.Number = o.next
	n := m.Size()
	o.sizes = append(o.sizes, n)
	o.bytes += n
	if err := r.po.van.Reply(r.partner, m); errors.As(err, new(*van.LimitError)) {
		r.evict(err)
	}
}

// after calls answer when the partner has applied all that was sent so far, at once if there is no backup.
// The caller holds mu.
func (r *replica) after(bytes int, answer func()) {
	if o := r.out; o != nil && o.synced && o.applied < o.next {
		o.waiting = append(o.waiting, waiter{o.next, bytes, answer})
		o.waitingBytes += bytes
		return
	}
	answer()
}

// windowOf returns the window of a customer. The caller holds mu.
func (r *replica) windowOf(sender senderKey) *window {
	w := r.applied[sender]
	if w == nil {
		w = &window{applied: make(map[int64]struct{})}
		r.applied[sender] = w
	}
	return w
}

// senderOf returns the sender of a push that the message m is, or is about.
func senderOf(h *pspb.Header) senderKey {
	p := h.Replica
	return senderKey{process: van.Process{ID: int(p.Worker), Incarnation: p.Incarnation,
		Generation: p.Generation}, customer: p.Customer}
}

// about returns the description of the pushes of a sender.
func about(kind pspb.Replica_Kind, sender senderKey) *pspb.Replica {
	return &pspb.Replica{Kind: kind, Worker: int32(sender.process.ID),
		Incarnation: sender.process.Incarnation,
		Generation:  sender.process.Generation, Customer: sender.customer}
}

// request does the push of a request, unless it was applied before, and returns the places of its values. It
// passes the push to the partner, which then reads the frames of m: free is called when that is over, if
// forwarded is true. The caller holds mu.
func (r *replica) request(from van.Process, m *van.Message, list *serverList, lens []int32,
	total int) (places *resolved, forwarded bool, err error) {
	h := m.Header
	sender := senderKey{process: from.Whole(), customer: h.CustomerId}
	init, push := h.Head == InitCmd, h.Push
	if push {
		if n := len(list.keys)*keyBytes + m.Bytes(); n > van.MaxDataBytes {
			return nil, false, fmt.Errorf("a push with replicas has %d bytes, want at most %d", n, van.MaxDataBytes)
		}
		if push, err = r.windowOf(sender).fresh(h.Completed, h.Timestamp); err != nil {
			return nil, false, err
		}
		if !push && !h.Pull {
			return &resolved{}, false, nil
		}
	}
	if r.lost && !init {
		if err := r.store.has(list); err != nil {
			return nil, false, err
		}
	}
	if places, err = r.store.resolve(list, push, lens, total); err == nil && h.Pull {
		err = r.store.checkPull(places)
	}
	if err != nil || !push {
		return places, false, err
	}
	r.store.push(places, m.Data[1], init)
	r.windowOf(sender).applied[h.Timestamp] = struct{}{}
	return places, r.forward(sender, m, list), nil
}

// forward passes a push to the partner. If it returns true, m is released when its frames are not needed any
// longer. It copies frames that the worker may change when it has left. The caller holds mu.
func (r *replica) forward(sender senderKey, m *van.Message, list *serverList) bool {
	o := r.out
	if o == nil {
		return false
	}
	var keys []byte
	if o.lists.lists[list.replicated] != list {
		o.list++
		list.replicated = o.list
		o.lists.addList(list.replicated, list)
		keys = bytesOfKeys(list.keys)
	}
	copied, borrowed := r.makeMessage(about(pspb.Replica_PUSH, sender)), m.Borrowed()
	if frames := [][]byte{keys, m.Data[1], m.Data[2]}; borrowed {
		r.po.van.Allocate(r.partner.ID, copied, len(keys), len(m.Data[1]), len(m.Data[2]))
		for i, d := range frames {
			copy(copied.Data[i], d)
		}
	} else {
		copied.Data, copied.Free = frames, m.Release
	}
	h := copied.Header
	h.Push, h.Head, h.Timestamp, h.Completed, h.KeyList = true, m.Header.Head, m.Header.Timestamp,
		m.Header.Completed, list.replicated
	copied.SetTypes(pspb.DataType_UINT64, wireTypes[r.store.dt], pspb.DataType_INT32)
	r.sendNext(copied)
	return !borrowed
}

// receive handles a message of the other server.
func (r *replica) receive(from van.Process, m *van.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.follow()
	h := m.Header
	if from.Whole() != r.partner || r.ended || r.closed && h.Replica.Kind != pspb.Replica_APPLIED {
		m.Release() // another process has taken the place of the sender, or it has ended
		return
	}
	switch kind := h.Replica.Kind; {
	case kind == pspb.Replica_SYNC && h.Error != "":
		m.Release()
		r.asked = false // it is sent again later
	case h.Error != "":
		text := h.Error
		m.Release()
		r.evict(fmt.Errorf("it cannot apply a replicated message: %s", text))
	case kind == pspb.Replica_SYNC:
		if r.role != primary || r.out != nil {
			r.po.refuse(from, m, errors.New("it has no values for another server"))
			return
		}
		m.Release()
		r.out = newOutStream(false)
		r.transfer()
		r.measureLag()
	case kind == pspb.Replica_APPLIED:
		number := h.Replica.Number
		m.Release()
		r.acknowledged(number)
	case r.in == nil || r.in.broken || h.Replica.Number <= r.in.next || r.in.early[h.Replica.Number] != nil:
		m.Release()
	case len(r.in.early) > 2*maxUnapplied:
		m.Release()
		r.refuseNext(errors.New("too many messages have overtaken another one"))
	default:
		r.in.early[h.Replica.Number] = m
		r.arrived()
	}
}

// acknowledged records that the partner has applied all messages up to a number. The caller holds mu.
func (r *replica) acknowledged(number uint64) {
	o := r.out
	if o == nil || number <= o.applied || number > o.next {
		return
	}
	for ; o.applied < number; o.applied++ {
		o.bytes -= o.sizes[0]
		o.sizes = o.sizes[1:]
	}
	o.progress = time.Now()
	answered := 0
	for ; answered < len(o.waiting) && o.waiting[answered].number <= number; answered++ {
		o.waitingBytes -= o.waiting[answered].bytes
		o.waiting[answered].answer()
	}
	o.waiting = slices.Delete(o.waiting, 0, answered)
	r.hasRoom()
	switch {
	case r.role == primary && !o.synced:
		r.transfer()
	case r.role == primary && o.complete > 0 && o.applied >= o.complete &&
		r.partner.ID == van.ServerID(r.home):
		// The server whose range it is has everything, and takes it over. From now on this one is the backup.
		r.role, r.in = backup, newInStream()
		r.sendNext(r.makeMessage(&pspb.Replica{Kind: pspb.Replica_TAKE}))
		r.measureLag()
	case r.role == backup && o.applied == o.next:
		r.out = nil
		r.measureLag()
	}
}

// transfer sends values to a partner that does not have all of them, until enough are on their way. The
// caller holds mu.
func (r *replica) transfer() {
	o := r.out
	if o.piece > o.applied {
		return
	}
	for range maxPieces {
		p := r.store.next(&o.at, pieceBytes)
		if p == nil {
			break
		}
		m := r.makeMessage(&pspb.Replica{Kind: pspb.Replica_VALUES})
		r.po.van.Allocate(r.partner.ID, m, r.store.sizes(p)...)
		r.store.write(p, m.Data)
		m.SetTypes(pspb.DataType_UINT64, pspb.DataType_INT32, wireTypes[r.store.dt],
			wireTypes[r.store.rule.compute])
		r.sendNext(m)
		o.piece = o.next
	}
	if !r.store.done(o.at) {
		return
	}
	for sender, w := range r.applied {
		m := r.makeMessage(about(pspb.Replica_SENDER, sender))
		m.Header.Completed, m.Header.Replica.Applied = w.completed, slices.Collect(maps.Keys(w.applied))
		r.sendNext(m)
	}
	r.sendNext(r.makeMessage(&pspb.Replica{Kind: pspb.Replica_COMPLETE, Lost: r.lost}))
	o.synced, o.complete = true, o.next
}

// arrived applies the messages of the partner that are next. The caller holds mu.
func (r *replica) arrived() {
	for in := r.in; r.in == in; {
		m := in.early[in.next+1]
		if m == nil {
			break
		}
		delete(in.early, in.next+1)
		err := r.apply(m)
		m.Release()
		if err != nil {
			r.refuseNext(err)
			return
		}
		in.next++
		r.reply(&pspb.Replica{Kind: pspb.Replica_APPLIED, Number: in.next}, nil)
	}
}

// refuseNext tells the partner that the next message cannot be applied. The partner then makes the scheduler
// declare this server dead. The caller holds mu.
func (r *replica) refuseNext(err error) {
	r.po.log.Error("ps: a message of another server cannot be applied", zap.Int("app", r.app),
		zap.String("from", van.Name(r.partner.ID)), zap.Error(err))
	r.in.drop()
	r.in.broken = true
	r.reply(&pspb.Replica{Kind: pspb.Replica_APPLIED, Number: r.in.next + 1}, err)
}

// apply does what a message of the partner says. The caller holds mu.
func (r *replica) apply(m *van.Message) error {
	h := m.Header
	if kind := h.Replica.Kind; r.role == joining && kind == pspb.Replica_TAKE ||
		r.role == backup && kind != pspb.Replica_TAKE && kind != pspb.Replica_PUSH {
		return fmt.Errorf("malformed message: unexpected %s", kind)
	}
	switch h.Replica.Kind {
	case pspb.Replica_VALUES:
		return r.store.put(m)
	case pspb.Replica_PUSH:
		return r.applyPush(m)
	case pspb.Replica_SENDER:
		w := r.windowOf(senderOf(h))
		w.completed = h.Completed
		if clear(w.applied); len(h.Replica.Applied) > maxOutstanding {
			return fmt.Errorf("malformed message: %d pushes, want at most %d", len(h.Replica.Applied),
				maxOutstanding)
		}
		for _, t := range h.Replica.Applied {
			w.applied[t] = struct{}{}
		}
	case pspb.Replica_COMPLETE:
		r.role, r.lost = backup, h.Replica.Lost
		r.measureLag()
		r.po.joining[van.Rank(r.partner.ID)].Add(-1)
		r.po.log.Info("ps: this server has all values of a range", zap.Int("app", r.app),
			zap.Int("range", r.home))
	case pspb.Replica_TAKE:
		r.role, r.in, r.out = primary, nil, newOutStream(true)
		r.measureLag()
	default:
		return fmt.Errorf("malformed message: unknown kind %d", h.Replica.Kind)
	}
	return nil
}

// applyPush applies a push that the partner has applied. While joining, this server has the values of some
// keys, and gets those of the others later, so it leaves out the others. The caller holds mu.
func (r *replica) applyPush(m *van.Message) error {
	h := m.Header
	if err := checkFrames(m, r.store.dt); err != nil {
		return err
	}
	list := r.in.lists.lists[h.KeyList]
	if len(m.Data[0]) > 0 {
		list = &serverList{keys: slices.Clone(keysOfBytes(m.Data[0]))}
		if err := checkKeys(list.keys); err != nil {
			return err
		}
		r.in.lists.addList(h.KeyList, list)
	}
	if list == nil {
		return fmt.Errorf("malformed message: there is no list of keys %d", h.KeyList)
	}
	var lens []int32
	if len(m.Data[2]) > 0 {
		lens = tensor.View[int32](m.Data[2])
	}
	total := len(m.Data[1]) / r.store.dt.Size()
	if err := checkSizes(len(list.keys), total, lens); err != nil {
		return err
	}
	w := r.windowOf(senderOf(h))
	// The partner decides which pushes are applied.
	if _, err := w.fresh(h.Completed, h.Timestamp); err != nil {
		return err
	}
	init := h.Head == InitCmd
	if r.role == joining {
		if err := r.store.pushKnown(list.keys, lens, m.Data[1], init); err != nil {
			return err
		}
	} else {
		places, err := r.store.resolve(list, true, lens, total)
		if err != nil {
			return err
		}
		r.store.push(places, m.Data[1], init)
	}
	w.applied[h.Timestamp] = struct{}{}
	return nil
}

// checkReplicas returns an error if the job cannot have as many replicas as HVD_PS_REPLICAS says.
func checkReplicas(s *config.ParameterServer) error {
	switch {
	case s.Replicas == 0:
		return nil
	case s.NumServers < 2:
		return fmt.Errorf("HVD_PS_REPLICAS is %d, which needs at least 2 servers, but DMLC_NUM_SERVER is %d",
			s.Replicas, s.NumServers)
	case s.Staleness != config.Unset:
		return fmt.Errorf("HVD_PS_REPLICAS is %d, which cannot be used with HVD_STALENESS=%d: replicas are for "+
			"asynchronous jobs", s.Replicas, s.Staleness)
	}
	return nil
}
