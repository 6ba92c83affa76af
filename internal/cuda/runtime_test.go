//go:build nccl && cgo

package cuda_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

func TestMain(m *testing.M) { os.Exit(testcuda.Main(m)) }

// load returns the runtime of the stand-in, and its device 1.
func load(t *testing.T) (*cuda.Runtime, *cuda.Device) {
	t.Helper()
	r, err := cuda.Load(testcuda.CUDA())
	if err != nil {
		t.Fatal(err)
	}
	d, err := r.Device(1)
	if err != nil {
		t.Fatal(err)
	}
	return r, d
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestDevice(t *testing.T) {
	r, d := load(t)
	n, err := r.Count()
	if err != nil || n != 4 || r.Version != 12080 || r.DriverVersion != 12080 {
		t.Errorf("got %d devices, versions %d and %d, want 4, 12080 and 12080: %v", n, r.Version,
			r.DriverVersion, err)
	}
	_, err = r.Device(4)
	testnet.WantError(t, err, "cuda: got device 4, want a number below 4, the number of devices")
	_, before, err := d.Memory()
	if err != nil {
		t.Fatal(err)
	}
	memory := must[[]byte](t)(d.Alloc(1 << 20))
	unused, total, err := d.Memory()
	if err != nil || before != total || unused != total-1<<20 {
		t.Errorf("with 1 MiB in use: got %d of %d bytes free, %v", unused, total, err)
	}
	if err := d.Free(memory); err != nil {
		t.Error(err)
	}
	_, err = d.Alloc(2 << 30)
	testnet.WantError(t, err,
		"cuda: cudaMalloc: out of memory (cudaErrorMemoryAllocation, 2): 2147483648 bytes on device 1")
	var failure *cuda.Error
	if !errors.As(err, &failure) || failure.Code != 2 {
		t.Errorf("got %v, want a *cuda.Error with code 2", err)
	}
}

// TestStreams checks that a stream executes work in order, and that a stream waits for an event of another.
func TestStreams(t *testing.T) {
	_, d := load(t)
	one, two := must[*cuda.Stream](t)(d.NewStream()), must[*cuda.Stream](t)(d.NewStream())
	e := must[*cuda.Event](t)(d.NewEvent())
	memory := must[[]byte](t)(d.Alloc(8))
	in, out := []byte("12345678"), make([]byte, 8)
	steps := []error{
		one.Fill(memory, 'x'), one.Copy(memory[2:], in[2:]), e.Record(one), two.Wait(e),
		two.Copy(out, memory),
		two.Synchronize(),
	}
	if err := errors.Join(steps...); err != nil {
		t.Fatal(err)
	}
	runtime.KeepAlive(in)
	if want := []byte("xx345678"); !bytes.Equal(out, want) {
		t.Errorf("got %q, want %q", out, want)
	}
	if done, err := e.Query(); !done || err != nil {
		t.Errorf("the event has not ended: %v", err)
	}
	if err := one.Copy(memory, in[1:]); err == nil {
		t.Error("a copy of 7 bytes to 8 bytes was accepted")
	}
	if err := errors.Join(e.Close(), one.Close(), two.Close(), d.Free(memory)); err != nil {
		t.Error(err)
	}
}

func TestEventIsNotReadyBefore(t *testing.T) {
	t.Setenv("STANDIN_CUDA_DELAY_US", "100000")
	_, d := load(t)
	s, e := must[*cuda.Stream](t)(d.NewStream()), must[*cuda.Event](t)(d.NewEvent())
	if done, err := e.Query(); !done || err != nil {
		t.Errorf("an event without a record is not ready: %v", err)
	}
	if err := e.Record(s); err != nil {
		t.Fatal(err)
	}
	done, err := e.Query()
	if done || err != nil {
		t.Errorf("the event has ended at once: %v", err)
	}
	testnet.Eventually(t, "the event ends", func() bool {
		done, err := e.Query()
		return done && err == nil
	})
}

func TestLoadFails(t *testing.T) {
	_, err := cuda.Load("/no/such/libcudart.so")
	testnet.WantError(t, err, "cuda: no library could be loaded", "/no/such/libcudart.so", "No such file")
	_, err = cuda.Load("libm.so.6")
	testnet.WantError(t, err, "libm.so.6 lacks cudaGetDeviceCount, ")
}

// TestSearch checks that the search for a library goes on after one that cannot be used.
func TestSearch(t *testing.T) {
	tried := 0
	names := []string{"/no/such/library.so", "libm.so.6", testcuda.CUDA()}
	err := cuda.OpenLibrary(func(l *cuda.Library) error {
		if tried++; l.File != testcuda.CUDA() {
			return errors.New("not the runtime")
		}
		return nil
	}, names...)
	if err != nil || tried != 2 {
		t.Errorf("got %v after %d libraries, want 2", err, tried)
	}
	err = cuda.OpenLibrary(func(*cuda.Library) error { return errors.New("refused") }, names...)
	testnet.WantError(t, err, "/no/such/library.so: cannot open", "; refused; refused")
	t.Setenv("STANDIN_CUDA_DRIVER", "11080")
	r, err := cuda.Load("") // the stand-in, which this process has loaded
	if err != nil || r.Library.File != testcuda.CUDA() || r.CheckDriver() == nil {
		t.Errorf("got %+v and %v, want the only runtime, although the driver is too old", r, err)
	}
}

// TestViolations runs this test again in processes that misuse the runtime, and expects that the stand-in
// ends them.
func TestViolations(t *testing.T) {
	misuse := map[string]struct {
		run  func(d *cuda.Device, s *cuda.Stream, memory []byte)
		want string
	}{
		"read": {func(_ *cuda.Device, _ *cuda.Stream, memory []byte) { println(memory[0]) },
			"unexpected fault address"},
		"free twice": {func(d *cuda.Device, _ *cuda.Stream, memory []byte) { d.Free(memory); d.Free(memory) },
			"violation: cudaFree"},
		"free a part": {func(d *cuda.Device, _ *cuda.Stream, memory []byte) { d.Free(memory[8:]) },
			"violation: cudaFree"},
		"fill host memory": {func(_ *cuda.Device, s *cuda.Stream, _ []byte) { s.Fill(make([]byte, 8), 1) },
			"violation: cudaMemsetAsync"},
		"use a closed stream": {func(_ *cuda.Device, s *cuda.Stream, memory []byte) {
			s.Close()
			s.Fill(memory, 1)
		},
			"violation: cudaMemsetAsync: stream"},
	}
	if name := os.Getenv("MISUSE"); name != "" {
		_, d := load(t)
		s, memory := must[*cuda.Stream](t)(d.NewStream()), must[[]byte](t)(d.Alloc(4096))
		misuse[name].run(d, s, memory)
		return
	}
	for name, m := range misuse {
		cmd := exec.Command(os.Args[0], "-test.run", "TestViolations$")
		cmd.Env = append(os.Environ(), "MISUSE="+name)
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), m.want) {
			t.Errorf("%s: got %v, want a process that ends with %q; it wrote\n%s", name, err, m.want, out)
		}
	}
}

// TestContexts checks that work on a device makes its context and no other, in whatever thread it is done. So
// processes with different devices work in exclusive mode, and the context of device 0 is not made in each of
// them.
func TestContexts(t *testing.T) {
	const variable = "CONTEXT_OF"
	if index := os.Getenv(variable); index != "" {
		useDevice(t, int(index[0]-'0'))
		return
	}
	folder := t.TempDir()
	start := func(index string) (cmd *exec.Cmd, in io.Closer, out *bufio.Reader, calls string) {
		calls = filepath.Join(t.TempDir(), "calls")
		cmd = exec.Command(os.Args[0], "-test.run", "TestContexts$", "-test.v")
		cmd.Env = append(os.Environ(), variable+"="+index, "STANDIN_CUDA_EXCLUSIVE="+folder,
			"STANDIN_CUDA_CALLS="+calls)
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := cmd.StdoutPipe()
		if err = errors.Join(err, cmd.Start()); err != nil {
			t.Fatal(err)
		}
		return cmd, stdin, bufio.NewReader(stdout), calls
	}
	for _, c := range []struct{ index, want string }{{"1", ""}, {"2", ""},
		{"1", "CUDA-capable device(s) is/are busy or unavailable (cudaErrorDevicesUnavailable, 46): device 1"}} {
		cmd, in, out, calls := start(c.index)
		text := ""
		for !strings.Contains(text, "used\n") {
			line, err := out.ReadString('\n')
			if text += line; err != nil {
				break
			}
		}
		made, err := os.ReadFile(calls)
		if c.want != "" {
			in.Close()
			if !strings.Contains(text, c.want) {
				t.Errorf("device %s: got %s, want %q", c.index, text, c.want)
			}
			cmd.Wait()
			continue
		}
		defer cmd.Wait()
		defer in.Close()
		contexts := regexp.MustCompile(`(?m)^context .*$`).FindAllString(string(made), -1)
		if want := []string{"context " + c.index}; err != nil || !slices.Equal(contexts, want) {
			t.Errorf("device %s: got %q, want %q, %v: %s", c.index, contexts, want, err, text)
		}
	}
}

// useDevice uses a device in new threads, prints "used" and waits for the end of the standard input.
func useDevice(t *testing.T, index int) {
	r, err := cuda.Load(testcuda.CUDA())
	if err != nil {
		t.Fatal(err)
	}
	inNewThread := func(f func() error) {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // the thread ends with the goroutine
			done <- f()
		}()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	d := cuda.NewDevices(r)
	var memory, host []byte
	var e *cuda.Event
	on, err := r.Device(index)
	if err != nil {
		t.Fatal(err)
	}
	s := must[*cuda.Stream](t)(on.NewStream())
	inNewThread(func() (err error) { memory, err = on.Alloc(8); return err })
	inNewThread(func() (err error) { host, err = d.Borrow(index, 8); return err })
	inNewThread(func() error { return s.Fill(memory, 1) })
	inNewThread(func() (err error) { e, err = d.Mark(index, s.Handle()); return err })
	inNewThread(s.Synchronize)
	inNewThread(func() error { _, err := e.Query(); return err })
	inNewThread(func() error {
		_, err := d.Copy(t.Context(), index, nil, cuda.Copy{To: host, From: memory})
		return err
	})
	inNewThread(func() error { d.Release(e); d.GiveBack(index, host); return d.Close() })
	inNewThread(func() error { return errors.Join(on.Free(memory), s.Close()) })
	fmt.Println("used")
	io.Copy(io.Discard, os.Stdin)
}
