package launch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/frame"
)

// frames are one of each kind with the message that it is.
func frames(t testing.TB) map[string]message {
	encoded := func(k kind, v any) []byte {
		f, err := encodeJSON(k, v)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	job := hostJob{
		Host: "h1", Dir: words{"/\xff"}, Command: words{"a", "", "b"}, Env: words{"A=\xfe", "B="}, Ranks: []words{{"R=0"}, nil},
		Stores: []string{"[::1]:7"}, Secret: words{"hush"}, TLS: true, Liveness: time.Minute,
	}
	ended := report{Ended: true, At: 5, Code: 255, Signal: 9, Sent: 15}
	return map[string]message{
		string(encodeKind(kindPing)):                                                           {kind: kindPing},
		string(encodeKind(kindBegin)):                                                          {kind: kindBegin},
		string(encodeKind(kindForce)):                                                          {kind: kindForce},
		string(encodeKind(kindBye)):                                                            {kind: kindBye},
		string(encodeIndex(kindGone, 7)):                                                       {kind: kindGone, index: 7},
		string(encodeIndex(kindClosed, 1<<20)):                                                 {kind: kindClosed, index: 1 << 20},
		string(encodeSignal(258, unix.SIGKILL)):                                                {kind: kindSignal, index: 258, signal: unix.SIGKILL},
		string(encodeCredit(3, 1<<16)):                                                         {kind: kindCredit, index: 3, credit: 1 << 16},
		string(encodeOutput(5, []byte("text"))):                                                {kind: kindOutput, index: 5, text: []byte("text")},
		string(encoded(kindJob, job)):                                                          {kind: kindJob, job: job},
		string(encoded(kindReady, "10.0.0.1:7")):                                               {kind: kindReady, store: "10.0.0.1:7"},
		string(encoded(kindRefused, refusal{Text: "no", Command: "x", Status: 127})):           {kind: kindRefused, refusal: refusal{"no", "x", 127}},
		string(encoded(kindReport, hostReport{Index: 2, Report: ended})):                       {kind: kindReport, index: 2, report: ended},
		string(encoded(kindReport, hostReport{Index: 1, Report: report{Errno: unix.ENOEXEC}})): {kind: kindReport, index: 1, report: report{Errno: unix.ENOEXEC}},
	}
}

func TestFrames(t *testing.T) {
	for text, want := range frames(t) {
		body, err := frame.Read(strings.NewReader(text), maxAnswerBytes)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decode(body)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%v: got %+v and error %v, want %+v", want.kind, got, err, want)
		}
	}
}

func TestFramesThatCannotBe(t *testing.T) {
	for _, body := range []string{
		"", "\x01", "\x01{", "\x00x", "\x02x", "\x04x", "\x0cx", "\x03\x00\x00\x00\x01", "\x03\x00\x00\x00\x01xx", "\x05\x00\x00\x00\x01\x00\x00\x00",
		"\x09\x00\x00\x00", "\x0a\x00\x00\x00", "\x0b", "\x0d", "\xff", "\x08{\"Index\":1e99}", `{"Index":1,"Report":{"code":256}}`,
		"\x08" + `{"Index":1,"Report":{"code":256}}`, "\x08" + `{"Index":1,"Report":{"code":-1}}`, "\x08" + `{"Index":1,"Report":{"signal":128}}`,
		"\x08" + `{"Index":1,"Report":{"signal":-1}}`, "\x08" + `{"Index":1,"Report":{"errno":-1}}`, "\x08" + `{"Index":1,"Report":{"pid":-1}}`,
	} {
		if m, err := decode([]byte(body)); err == nil {
			t.Errorf("%q: got %+v, want an error", body, m)
		}
	}
}

// Whatever comes is a message or an error; a message that is encoded again is the same.
func FuzzDecode(f *testing.F) {
	for text := range frames(f) {
		f.Add([]byte(text[frame.HeaderBytes:]))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		m, err := decode(slices.Clone(body))
		if err != nil {
			return
		}
		var again []byte
		switch m.kind {
		case kindSignal:
			again = encodeSignal(m.index, m.signal)
		case kindCredit:
			again = encodeCredit(m.index, m.credit)
		case kindOutput:
			again = encodeOutput(m.index, m.text)
		case kindGone, kindClosed:
			again = encodeIndex(m.kind, m.index)
		case kindJob, kindReady, kindRefused, kindReport:
			v := map[kind]any{kindJob: m.job, kindReady: m.store, kindRefused: m.refusal, kindReport: hostReport{m.index, m.report}}[m.kind]
			if again, err = encodeJSON(m.kind, v); err != nil {
				t.Fatal(err)
			}
			m2, err := decode(again[frame.HeaderBytes:])
			if err != nil || !reflect.DeepEqual(m, m2) {
				t.Fatalf("got %+v, then %+v and error %v", m, m2, err)
			}
			return
		default:
			again = encodeKind(m.kind)
		}
		if !bytes.Equal(again[frame.HeaderBytes:], body) {
			t.Errorf("got %q again as %q", body, again)
		}
	})
}

// An agent may send what it likes: the launcher takes what may be, and nothing makes it wait or grow.
func FuzzTake(f *testing.F) {
	for text := range frames(f) {
		f.Add([]byte(text))
	}
	f.Add(slices.Concat(encodeIndex(kindGone, 0), encodeIndex(kindGone, 0), encodeOutput(0, make([]byte, 40000)), encodeOutput(0, make([]byte, 40000))))
	f.Fuzz(func(t *testing.T, text []byte) {
		h, events := testRemote(2)
		in := bytes.NewReader(text)
		for {
			body, err := frame.Read(in, maxAnswerBytes)
			if err != nil {
				break
			}
			if m, err := decode(body); err != nil || h.take(&m) != nil {
				break
			}
		}
		for _, flow := range h.outputs {
			if len(flow.text) > streamWindow {
				t.Errorf("%d bytes wait, want at most %d", len(flow.text), streamWindow)
			}
		}
		if len(events) > 2*maxNews+maxHostNews-1 {
			t.Errorf("%d events", len(events))
		}
	})
}

// testRemote has so many ranks and no agent.
func testRemote(ranks int) (*remote, chan event) {
	events := make(chan event, maxNews*ranks+maxHostNews)
	h := &remote{name: "h", events: events, told: make([]int, ranks), ended: make([]bool, ranks), settle: func() {}, out: outbox{more: make(chan struct{}, 1)}}
	for r := range ranks {
		h.ranks = append(h.ranks, r)
		for i := range 2 {
			h.outputs = append(h.outputs, &inflow{out: &h.out, id: 2*r + i, more: make(chan struct{}, 1)})
		}
	}
	return h, events
}

func TestAgentThatSaysTooMuch(t *testing.T) {
	ended := message{kind: kindReport, index: 1, report: report{Ended: true}}
	for name, messages := range map[string][]message{
		"reports":               {ended, ended, ended},
		"gone":                  {{kind: kindGone, index: 1}, {kind: kindGone, index: 1}},
		"report of who is gone": {{kind: kindGone, index: 1}, ended},
		"report of nobody":      {{kind: kindReport, index: 2}},
		"report below":          {{kind: kindReport, index: -1}},
		"ready":                 {{kind: kindReady}, {kind: kindReady}},
		"refused":               {{kind: kindRefused}, {kind: kindRefused}},
		"output":                {{kind: kindOutput, text: make([]byte, streamWindow)}, {kind: kindOutput, text: make([]byte, 1)}},
		"after the end":         {{kind: kindClosed, index: 3}, {kind: kindOutput, index: 3, text: make([]byte, 1)}},
		"no stream":             {{kind: kindOutput, index: 4}},
		"an order":              {{kind: kindBegin}},
		"bye":                   {{kind: kindGone}, {kind: kindBye}},
	} {
		h, _ := testRemote(2)
		for i, m := range messages {
			if err := h.take(&m); (err != nil) != (i == len(messages)-1) {
				t.Errorf("%s: message %d: got error %v", name, i, err)
			}
		}
	}
}

func TestWhenAnAgentHasToldAll(t *testing.T) {
	gone := []message{{kind: kindGone, index: 0}, {kind: kindGone, index: 1}}
	closed := []message{{kind: kindClosed, index: 0}, {kind: kindClosed, index: 1}, {kind: kindClosed, index: 2}, {kind: kindClosed, index: 3}}
	for name, c := range map[string]struct {
		messages []message
		want     bool
	}{
		"nothing":         {nil, false},
		"all":             {slices.Concat(gone, closed), true},
		"without a rank":  {slices.Concat(gone[:1], closed), false},
		"without an end":  {slices.Concat(closed[1:], gone), false},
		"refused":         {[]message{{kind: kindRefused}}, true},
		"refused, partly": {slices.Concat(gone[:1], []message{{kind: kindReady}, {kind: kindRefused}}, closed[:2]), true},
	} {
		h, _ := testRemote(2)
		for _, m := range c.messages {
			if err := h.take(&m); err != nil {
				t.Errorf("%s: got error %v", name, err)
			}
		}
		if got := h.complete(); got != c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}

func TestHello(t *testing.T) {
	read := func(text string) error { return readHello(bufio.NewReader(strings.NewReader(text))) }
	banner := strings.Repeat("\x00hvdrun host ", maxBannerBytes/13)
	for _, before := range []string{"", "Welcome\n", "\x00hvdrun host \x00", banner} {
		if err := read(before + string(hello())); err != nil {
			t.Errorf("after %d bytes: %v", len(before), err)
		}
	}
	for text, want := range map[string]string{
		"": "EOF", "menu": `printed "menu"`, helloMagic + "\x00\x00": "EOF", helloMagic + "\x00\x00\x00\x02": "speaks version 2",
		strings.Repeat("x", maxBannerBytes+1) + string(hello()): "it has printed",
	} {
		if err := read(text); err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 500 {
			t.Errorf("%.20q: got error %v, want one with %q", text, err, want)
		}
	}
}

func TestWords(t *testing.T) {
	for _, w := range []words{nil, {""}, {"", ""}, {"a"}, {"a", "", "\xff\n"}} {
		text, err := json.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		var got words
		if err := json.Unmarshal(text, &got); err != nil || !slices.Equal(got, w) {
			t.Errorf("got %q and error %v, want %q", got, err, w)
		}
	}
}

// An agent that reads nothing costs bounded memory, and is given up.
func TestOutboxIsBounded(t *testing.T) {
	o := outbox{more: make(chan struct{}, 1)}
	for range 2 * maxQueuedBytes / 1000 {
		o.put(make([]byte, 1000))
		if len(o.queue) > maxQueuedBytes {
			t.Fatalf("%d bytes wait, want at most %d", len(o.queue), maxQueuedBytes)
		}
	}
	mine, theirs, err := pipe(false)
	if err != nil {
		t.Fatal(err)
	}
	o.run(mine)
	agent := os.NewFile(uintptr(theirs), "")
	defer agent.Close()
	if got, err := io.ReadAll(agent); len(got) != 0 || err != nil {
		t.Errorf("got %d bytes and error %v, want the end", len(got), err)
	}
}

// Credit is given for what was read, and no more than there is room for.
func TestCredit(t *testing.T) {
	h, _ := testRemote(1)
	flow := h.outputs[1]
	credit := streamWindow
	r := relay{id: 1, credit: 0, more: make(chan struct{}, 1)}
	buf := make([]byte, 1000)
	for range 5000 {
		n := min(credit, 777)
		if err := flow.push(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		credit -= n
		for n > 0 {
			m, err := flow.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			n -= m
		}
		frames, _ := h.out.take()
		for in := bytes.NewReader(frames); in.Len() > 0; {
			body, err := frame.Read(in, maxOrderBytes)
			if err != nil {
				t.Fatal(err)
			}
			m, err := decode(body)
			if err != nil || m.kind != kindCredit || m.index != 1 {
				t.Fatalf("got %+v and error %v, want credit for stream 1", m, err)
			}
			credit += m.credit
		}
		if credit > streamWindow || credit < streamWindow*3/4 {
			t.Fatalf("got %d bytes of credit after all was read, want %d to %d", credit, streamWindow*3/4, streamWindow)
		}
	}
	if err := r.allow(streamWindow); err != nil {
		t.Error(err)
	}
	if err := r.allow(1); err == nil {
		t.Error("a credit above the window was taken")
	}
	flow.end()
	if n, err := flow.Read(buf); n != 0 || err != io.EOF {
		t.Errorf("got %d bytes and error %v, want the end", n, err)
	}
}

func TestPulse(t *testing.T) {
	mine, theirs, err := pipe(true)
	if err != nil {
		t.Fatal(err)
	}
	defer mine.Close()
	other := os.NewFile(uintptr(theirs), "")
	p := &pulse{file: mine, limit: time.Millisecond}
	began := time.Now()
	if _, err := p.Read(make([]byte, 1)); !errors.Is(err, errSilent) || time.Since(began) < pingInterval {
		t.Errorf("got error %v after %v, want silence after a second look", err, time.Since(began))
	}
	if _, err := other.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Read(make([]byte, 8)); n != 1 || err != nil || p.heard.Before(began) {
		t.Errorf("got %d bytes and error %v", n, err)
	}
	other.Close()
	if _, err := p.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("got error %v, want the end", err)
	}
}

func TestIsOfHost(t *testing.T) {
	for _, name := range []string{"HOSTNAME", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "HVD_HOSTID", "_", "PWD"} {
		if !IsOfHost(name) {
			t.Errorf("%s travels", name)
		}
	}
	for _, name := range []string{"PATH", "LD_LIBRARY_PATH", "HOROVOD_RANK", "HOROVOD_HOSTNAME", "HOMER", "PYTHONPATH", "", "VISIBLE_DEVICES_OF_MINE"} {
		if IsOfHost(name) {
			t.Errorf("%s does not travel", name)
		}
	}
}
