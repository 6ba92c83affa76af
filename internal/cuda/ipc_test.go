//go:build nccl && cgo

package cuda_test

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// ipc returns the functions for several processes of the stand-in, and its device 1.
func ipc(t *testing.T) (*cuda.IPC, *cuda.Runtime, *cuda.Device) {
	t.Helper()
	r, d := load(t)
	return must[*cuda.IPC](t)(cuda.NewIPC(r)), r, d
}

// TestIPC shares memory and an event with another process, which is this test too. The other process waits on
// its stream for the event and adds to the memory.
func TestIPC(t *testing.T) {
	if os.Getenv("IPC_CHILD") != "" {
		importer(t)
		return
	}
	t.Setenv("STANDIN_CUDA_DELAY_US", "20000")
	x, _, d := ipc(t)
	s := must[*cuda.Stream](t)(d.NewStream())
	memory := must[[]byte](t)(d.Alloc(8192))
	event := must[*cuda.Event](t)(x.NewEvent(d))
	child := exec.Command(os.Args[0], "-test.run", "TestIPC$", "-test.timeout", "60s")
	child.Env = append(os.Environ(), "IPC_CHILD=1")
	child.Stderr = os.Stderr
	in := must[io.WriteCloser](t)(child.StdinPipe())
	out := must[io.ReadCloser](t)(child.StdoutPipe())
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := child.Wait(); err != nil {
			t.Error(err)
		}
	}()
	defer in.Close()
	lines := bufio.NewReader(out)
	// The work on the memory is slow, and the child learns of it before it has ended.
	for _, err := range []error{s.Fill(memory, 'a'), s.Fill(memory[:2], 'b'), event.Record(s)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	fmt.Fprintf(in, "%x %x\n", must[cuda.Handle](t)(x.ExportMemory(d, memory)),
		must[cuda.Handle](t)(x.ExportEvent(event)))
	if got := must[string](t)(lines.ReadString('\n')); got != "read bbaa\n" {
		t.Errorf("got %q from the other process, want the bytes that were written before the event", got)
	}
	// The child has recorded the event after its own work, which need not have ended.
	got := make([]byte, 4)
	for _, err := range []error{s.Wait(event), s.Copy(got, memory[4096:4100]), s.Synchronize()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if string(got) != "cccc" {
		t.Errorf("got %q in memory that the other process has written before the event, want cccc", got)
	}
	if _, err := fmt.Fprintln(in, "end"); err != nil {
		t.Error(err)
	}
	io.Copy(io.Discard, lines)
	// In this process, the handles cannot be opened.
	_, err := x.OpenMemory(d, must[cuda.Handle](t)(x.ExportMemory(d, memory)), 8192)
	testnet.WantError(t, err, "cuda: cudaIpcOpenMemHandle: invalid argument")
	_, err = x.OpenEvent(d, must[cuda.Handle](t)(x.ExportEvent(event)))
	testnet.WantError(t, err, "cuda: cudaIpcOpenEventHandle: invalid argument")
	for _, err := range []error{event.Close(), d.Free(memory), s.Close()} {
		if err != nil {
			t.Error(err)
		}
	}
}

// importer is the other process of TestIPC.
func importer(t *testing.T) {
	_, r, _ := ipc(t)
	devices := cuda.NewDevices(r)
	var handles [2]cuda.Handle
	var text [2]string
	if _, err := fmt.Scanln(&text[0], &text[1]); err != nil {
		t.Fatal(err)
	}
	for i, s := range text {
		if n, err := hex.Decode(handles[i][:], []byte(s)); n != 64 || err != nil {
			t.Fatal(n, err)
		}
	}
	_, err := devices.Import("0000:99:00.0", handles[0], 8192)
	testnet.WantError(t, err, `no device "0000:99:00.0", only ["0000:01:00.0" "0000:02:00.0"`,
		"CUDA_VISIBLE_DEVICES")
	_, err = devices.Import("0000:02:00.0", cuda.Handle{}, 8192)
	testnet.WantError(t, err, "cuda: cudaIpcOpenMemHandle: invalid argument")
	_, err = devices.Import("0000:02:00.0", handles[0], 0)
	testnet.WantError(t, err, "cuda: cudaIpcOpenEventHandle: invalid argument")
	m := must[*cuda.Imported](t)(devices.Import("0000:02:00.0", handles[0], 8192))
	e := must[*cuda.Imported](t)(devices.Import("0000:02:00.0", handles[1], 0))
	again := must[*cuda.Imported](t)(devices.Import("0000:02:00.0", handles[0], 8192))
	if &again.Memory[0] != &m.Memory[0] || m.Device != 1 || e.Device != 1 {
		t.Error("an allocation that is opened twice has two addresses, or another device than 1")
	}
	d := must[*cuda.Device](t)(r.Device(1))
	s := must[*cuda.Stream](t)(d.NewStream())
	got := make([]byte, 4)
	steps := []error{
		s.Wait(e.Event), s.Copy(got, m.Memory[:4]), s.Synchronize(),
		s.Fill(m.Memory[4096:], 'c'), e.Event.Record(s),
	}
	for _, err := range steps {
		if err != nil {
			t.Fatal(err)
		}
	}
	fmt.Printf("read %s\n", got)
	var end string
	if _, err := fmt.Scanln(&end); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{again.Close(), m.Close(), e.Close(), s.Close()} {
		if err != nil {
			t.Error(err)
		}
	}
}

// TestIPCOfPlainEvent checks that only events for several processes have handles.
func TestIPCOfPlainEvent(t *testing.T) {
	x, _, d := ipc(t)
	_, err := x.ExportEvent(must[*cuda.Event](t)(d.NewEvent()))
	testnet.WantError(t, err, "cuda: cudaIpcGetEventHandle: invalid argument")
	_, err = x.ExportMemory(d, make([]byte, 8))
	testnet.WantError(t, err, "cuda: cudaIpcGetMemHandle: invalid argument")
}

func TestIPCIsMissing(t *testing.T) {
	r, _ := load(t)
	of := *r
	of.Library = must[*cuda.Library](t)(cuda.OpenLibrary("libm.so.6"))
	_, err := cuda.NewIPC(&of)
	testnet.WantError(t, err, "/libm.so.6 lacks cudaIpcGetMemHandle, cudaIpcOpenMemHandle, ")
}

// TestIPCViolations checks that the stand-in ends a process that closes memory that it has not opened.
func TestIPCViolations(t *testing.T) {
	if os.Getenv("IPC_MISUSE") != "" {
		x, _, d := ipc(t)
		x.CloseMemory(d, must[[]byte](t)(d.Alloc(8)))
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "TestIPCViolations$")
	cmd.Env = append(os.Environ(), "IPC_MISUSE=1")
	out, err := cmd.CombinedOutput()
	if want := "violation: cudaIpcCloseMemHandle"; err == nil || !strings.Contains(string(out), want) {
		t.Errorf("got %v, want a process that ends with %q; it wrote\n%s", err, want, out)
	}
}
