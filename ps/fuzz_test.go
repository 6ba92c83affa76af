package ps

import (
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
)

// messageOf returns a message with the encoded header h and frames.
func messageOf(h []byte, frames ...[]byte) *van.Message {
	header := new(pspb.Header)
	if proto.Unmarshal(h, header) != nil {
		return nil
	}
	sizes := make([]int, len(frames))
	header.Frames = header.Frames[:min(len(header.Frames), len(frames))]
	for i, f := range frames {
		sizes[i] = len(f)
		if i == len(header.Frames) {
			header.Frames = append(header.Frames, &pspb.Frame{})
		}
	}
	m := van.NewMessage(header, sizes...)
	for i, f := range frames {
		copy(m.Data[i], f)
	}
	return m
}

// FuzzServer passes requests to a KVServer. None may crash it, and what it accepts must fit together.
func FuzzServer(f *testing.F) {
	add := func(h *pspb.Header, keys, vals, lens []byte) {
		b, err := proto.Marshal(h)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, keys, vals, lens)
	}
	types := []*pspb.Frame{{}, {Type: pspb.DataType_FLOAT}}
	add(&pspb.Header{Push: true, KeyList: 1, Frames: types}, make([]byte, 8), make([]byte, 8), nil)
	add(&pspb.Header{Pull: true, KeyList: 1, Frames: types}, nil, nil, nil)
	add(&pspb.Header{Push: true, Pull: true, KeyList: 2, Frames: types}, make([]byte, 16), make([]byte, 8),
		make([]byte, 8))
	add(&pspb.Header{WantKeys: true, KeyList: 3}, make([]byte, 8), nil, nil)
	f.Fuzz(func(t *testing.T, h, keys, vals, lens []byte) {
		po := &postoffice{log: zap.NewNop(), customers: make(map[customerKey]*customer)}
		po.van = van.New(van.Config{Role: van.Server, Customers: 1, Rank: -1}, router{po})
		sum := Sum[float32]()
		s := &KVServer[float32]{lists: make(map[senderKey]*serverLists),
			parked: make(map[parkedKey]*van.Message),
			handler: KVHandler[float32](func(meta KVMeta, data KVPairs[float32], s *KVServer[float32]) {
				if n := len(data.Vals); meta.Push && data.Lens == nil && n%len(data.Keys) != 0 ||
					!meta.Push && n > 0 {
					t.Errorf("%d values came with %d keys", n, len(data.Keys))
				}
				sum.handle(meta, data, s)
			})}
		c := &customer{po: po, request: s.dispatch}
		s.SimpleApp = &SimpleApp{c: c}
		for _, frames := range [][][]byte{{keys, vals, lens}, {nil, vals, lens}, {keys}, {keys, vals}, {}} {
			if m := messageOf(h, frames...); m != nil {
				s.dispatch(van.Process{ID: 9}, m)
			}
		}
	})
}

// FuzzResponse passes responses to a pull of a KVWorker.
func FuzzResponse(f *testing.F) {
	f.Add([]byte{}, make([]byte, 8), []byte{})
	f.Add([]byte{}, make([]byte, 12), []byte{1, 0, 0, 0, 2, 0, 0, 0})
	f.Fuzz(func(t *testing.T, h, vals, lens []byte) {
		for _, frames := range [][][]byte{{vals, lens}, {vals}, {}} {
			m := messageOf(h, frames...)
			if m == nil {
				return
			}
			if len(m.Header.Frames) > 0 {
				m.Header.Frames[0].Type = pspb.DataType_FLOAT
			}
			var out []float32
			var outLens []int32
			op := operation[float32]{out: &out, options: options{outLens: &outLens}}
			list := &keyList{keys: []uint64{1, 2}, bounds: []int{0, 2}}
			parts := []part{{to: van.ServerID(0), home: 1, response: m}}
			if op.assemble(list, parts) == nil && len(outLens) != 2 {
				t.Errorf("2 keys have %d lengths", len(outLens))
			}
		}
	})
}

// FuzzReplica passes messages of another server to a replica in each role.
func FuzzReplica(f *testing.F) {
	add := func(h *pspb.Header, frames ...[]byte) {
		h.Range, h.Request = 1, true
		b, err := proto.Marshal(h)
		if err != nil {
			f.Fatal(err)
		}
		frames = append(frames, nil, nil, nil, nil)
		f.Add(b, frames[0], frames[1], frames[2], frames[3])
	}
	numbers := make([]byte, 16)
	numbers[0], numbers[8] = 1, 2
	lens := []byte{1, 0, 0, 0, 1, 0, 0, 0}
	for _, kind := range []pspb.Replica_Kind{pspb.Replica_VALUES, pspb.Replica_PUSH, pspb.Replica_SENDER,
		pspb.Replica_COMPLETE, pspb.Replica_TAKE, pspb.Replica_APPLIED, pspb.Replica_SYNC} {
		h := &pspb.Header{Push: kind == pspb.Replica_PUSH, Timestamp: 3, KeyList: 1, Replica: &pspb.Replica{
			Kind: kind, Number: 1, Worker: 9, Applied: []int64{1, 2}}}
		switch kind {
		case pspb.Replica_VALUES:
			(&van.Message{Header: h}).SetTypes(pspb.DataType_UINT64, pspb.DataType_INT32, pspb.DataType_FLOAT,
				pspb.DataType_FLOAT)
			add(h, numbers, lens, make([]byte, 8), make([]byte, 24))
		case pspb.Replica_PUSH:
			(&van.Message{Header: h}).SetTypes(pspb.DataType_UINT64, pspb.DataType_FLOAT, pspb.DataType_INT32)
			add(h, numbers, make([]byte, 8), lens)
		default:
			add(h)
		}
	}
	f.Fuzz(func(t *testing.T, h, a, b, c, d []byte) {
		for _, role := range []replicaRole{joining, backup, primary} {
			po := &postoffice{log: zap.NewNop(), customers: make(map[customerKey]*customer),
				joining: make([]atomic.Int32, 2)}
			po.van = van.New(van.Config{Role: van.Server, Customers: 1, Rank: -1, NumServers: 2, Replicas: 1},
				router{po})
			empty := Adam[float32](0.1, 0.9, 0.99, 1e-3).(*builtIn[float32]).empty
			r := &replica{po: po, empty: empty, store: empty(), role: role, asked: true,
				partner: van.Process{ID: 10}, applied: make(map[senderKey]*window)}
			if role == primary {
				r.out = newOutStream(true)
				r.sendNext(r.makeMessage(&pspb.Replica{Kind: pspb.Replica_TAKE}))
			} else {
				r.in = newInStream()
			}
			for i, frames := range [][][]byte{{a, b, c, d}, {a, b, c}, {}} {
				m := messageOf(h, frames...)
				if m == nil || m.Header.Replica == nil {
					return
				}
				m.Header.Replica.Number += uint64(i)
				r.receive(r.partner, m)
			}
			for key, e := range r.store.entries {
				if e.at < 0 || (e.at+e.n)*4 > len(e.chunk.vals) {
					t.Errorf("key %d has the place %d of %d values", key, e.at, len(e.chunk.vals)/4)
				}
			}
		}
	})
}
