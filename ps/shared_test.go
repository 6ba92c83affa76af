package ps

import (
	"sync/atomic"
	"testing"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/tensor"
)

// fromShared returns a message whose frames are in memory that its sender can still change, and a function
// that changes all of it.
func fromShared(h *pspb.Header, types []pspb.DataType, frames ...[]byte) (m *van.Message, change func()) {
	sizes := make([]int, len(frames))
	for i, f := range frames {
		sizes[i] = len(f)
	}
	m = van.NewMessage(h, sizes...)
	m.SetTypes(types...)
	var theirs [][]byte
	for i, f := range frames {
		copy(m.Data[i], f)
		h.Frames[i].Block = 1
		theirs = append(theirs, m.Data[i])
	}
	return m, func() {
		for _, b := range theirs {
			for i := range b {
				b[i] = 0x7f
			}
		}
	}
}

var (
	pushTypes  = []pspb.DataType{pspb.DataType_UINT64, pspb.DataType_FLOAT, pspb.DataType_INT32}
	valueTypes = []pspb.DataType{pspb.DataType_UINT64, pspb.DataType_INT32, pspb.DataType_FLOAT,
		pspb.DataType_FLOAT}
)

// A worker changes the keys and lengths of its push in shared memory when the server has checked them.
func TestWorkerChangesLengths(t *testing.T) {
	po := &postoffice{log: zap.NewNop(), customers: make(map[customerKey]*customer)}
	po.set.PS.Staleness = config.Unset
	po.van = van.New(van.Config{Role: van.Server, Customers: 1, Rank: -1}, router{po})
	m, change := fromShared(&pspb.Header{Push: true, KeyList: 1}, pushTypes, bytesOfKeys([]uint64{1, 2}),
		make([]byte, 12), tensor.Bytes([]int32{1, 2}))
	sum := Sum[float32]().(*builtIn[float32])
	s := &KVServer[float32]{lists: make(map[senderKey]*serverLists), parked: make(map[parkedKey]*van.Message)}
	s.handler = KVHandler[float32](func(meta KVMeta, data KVPairs[float32], s *KVServer[float32]) {
		change()
		sum.handle(meta, data, s)
	})
	c := &customer{po: po, request: s.dispatch}
	s.SimpleApp = &SimpleApp{c: c}
	s.dispatch(van.Process{ID: 9}, m)
	if e := sum.store.entries; len(e) != 2 || e[1].n != 1 || e[2].n != 2 {
		t.Errorf("the server has the entries %+v, want key 1 with 1 value and key 2 with 2", e)
	}
}

// A server changes the keys and lengths of what it sends to the other server of a range. Neither server may
// read them in shared memory after it has checked them.
func TestServerChangesLengths(t *testing.T) {
	po := &postoffice{log: zap.NewNop(), customers: make(map[customerKey]*customer),
		joining: make([]atomic.Int32, 2)}
	po.van = van.New(van.Config{Role: van.Server, Customers: 1, Rank: -1, NumServers: 2, Replicas: 1},
		router{po})
	empty := Sum[float32]().(*builtIn[float32]).empty
	r := &replica{po: po, empty: empty, store: empty(), role: joining, in: newInStream(),
		applied: make(map[senderKey]*window)}
	keys, lens := bytesOfKeys([]uint64{1, 2}), tensor.Bytes([]int32{1, 2})
	values, changeValues := fromShared(&pspb.Header{Replica: &pspb.Replica{Kind: pspb.Replica_VALUES}},
		valueTypes, keys, lens, make([]byte, 12), nil)
	push, changePush := fromShared(&pspb.Header{Push: true, KeyList: 1, Timestamp: 1,
		Replica: &pspb.Replica{Kind: pspb.Replica_PUSH}}, pushTypes, keys, make([]byte, 12), lens)
	for _, m := range []*van.Message{values, push} {
		if err := r.apply(m); err != nil {
			t.Fatal(err)
		}
	}
	// apply reads a frame only where m says it is, so m tells which memory it has read.
	changeValues()
	changePush()
	for what, frame := range map[string][]byte{"keys of values": values.Data[0],
		"lengths of values": values.Data[1], "lengths of a push": push.Data[2]} {
		if frame[0] == 0x7f {
			t.Errorf("the %s were read in shared memory", what)
		}
	}
	if k := r.in.lists.lists[1].keys; k[0] != 1 || k[1] != 2 {
		t.Errorf("the keys of the push are %v", k)
	}
}
