package dial_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"runtime"
	"testing"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/testnet"
)

func TestReadFrame(t *testing.T) {
	for _, n := range []int{0, 1, dial.FrameStep - 1, dial.FrameStep, dial.FrameStep + 1,
		3*dial.FrameStep + 7, 100 * dial.FrameStep} {
		body := bytes.Repeat([]byte{'x'}, n)
		f := dial.SealFrame(append(dial.NewFrame(n), body...))
		got, err := dial.ReadFrame(bytes.NewReader(f), n)
		if err != nil || !bytes.Equal(got, body) {
			t.Errorf("frame of %d bytes: got %d, %v", n, len(got), err)
		}
		if n == 0 {
			continue
		}
		_, err = dial.ReadFrame(bytes.NewReader(f), n-1)
		testnet.WantError(t, err, fmt.Sprintf("frame of %d bytes, want at most %d", n, n-1))
		for _, cut := range []int{dial.FrameHeaderBytes, dial.FrameHeaderBytes + n/2,
			dial.FrameHeaderBytes + n - 1} {
			if _, err := dial.ReadFrame(bytes.NewReader(f[:cut]), n); err != io.ErrUnexpectedEOF {
				t.Errorf("frame of %d bytes cut at %d: got %v", n, cut, err)
			}
		}
	}
	if _, err := dial.ReadFrame(bytes.NewReader(nil), 1); err != io.EOF {
		t.Errorf("at the end: got %v, want EOF", err)
	}
}

func TestReadFrameTrustsNoLength(t *testing.T) {
	const frames, limit = 100, 2 << 20
	large := make([]byte, dial.FrameHeaderBytes+5*dial.FrameStep)
	binary.BigEndian.PutUint32(large, limit)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range frames {
		if _, err := dial.ReadFrame(bytes.NewReader(large), limit); err != io.ErrUnexpectedEOF {
			t.Fatalf("got %v", err)
		}
	}
	runtime.ReadMemStats(&after)
	// TotalAlloc also counts buffers that were later replaced by larger ones. So the limit here is greater
	// than the memory in use at any time.
	if got, most := (after.TotalAlloc-before.TotalAlloc)/frames, uint64(8*len(large)); got > most {
		t.Errorf("a frame of %d bytes, %d of them there, allocates %d, want at most %d", limit, len(large),
			got, most)
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte{}, 10)
	f.Add([]byte{0, 0, 0, 3, 1, 2, 3}, 3)
	f.Add([]byte{255, 255, 255, 255, 1}, 1<<20)
	f.Fuzz(func(t *testing.T, in []byte, limit int) {
		limit = min(max(limit, 0), 2<<20)
		body, err := dial.ReadFrame(bytes.NewReader(in), limit)
		if err != nil {
			return
		}
		if len(body) > limit {
			t.Fatalf("got %d bytes, limit %d", len(body), limit)
		}
		if out := dial.SealFrame(append(dial.NewFrame(0), body...)); !bytes.HasPrefix(in, out) {
			t.Fatalf("%x was read as %x", in, out)
		}
	})
}
