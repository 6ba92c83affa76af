package trace_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
)

// FuzzDecodeNode checks that a state that can be decoded is the same after it was encoded and decoded again.
func FuzzDecodeNode(f *testing.F) {
	n := trace.Node{Name: "worker 1", Role: "worker", Returned: true, Up: time.Hour, Final: true,
		Operations: []trace.Operations{{Kind: message.Push}}, Unreplicated: 2,
		Peers: []trace.Peer{{ID: 8, Name: "server 0", Requests: 3, Waiting: 1, SentBytes: 4, ReceivedBytes: 5,
			Resent: 6, Duplicates: 7, LagMessages: 8, LagBytes: 9, Responses: 2, ResponseTime: time.Second,
			HeldUp: time.Minute}},
		Waits: []trace.NodeWait{{What: "push of 1 keys", Time: 1, Waiting: []string{"worker 1"},
			Missing: []string{"server 0"}}}}
	n.Operations[0].Durations.Add(time.Millisecond)
	text, err := n.Encode()
	if err != nil {
		f.Fatal(err)
	}
	if got, err := trace.DecodeNode(text); err != nil || !reflect.DeepEqual(*got, n) {
		f.Fatalf("got %+v, %v, want %+v", got, err, n)
	}
	f.Add(text)
	for _, malformed := range []string{"", "{}", "[]", `{"Name":"x","Up":-1}`,
		`{"Name":"x","Waits":[{}]}`} {
		if _, err := trace.DecodeNode([]byte(malformed)); err == nil {
			f.Errorf("%q was decoded", malformed)
		}
		f.Add([]byte(malformed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		n, err := trace.DecodeNode(text)
		if err != nil {
			return
		}
		again, err := n.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := trace.DecodeNode(again)
		if err != nil || got.Name != n.Name || len(got.Peers) != len(n.Peers) {
			t.Errorf("got %+v, %v, want %+v", got, err, n)
		}
	})
}
