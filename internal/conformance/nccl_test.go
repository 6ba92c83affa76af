//go:build nccl && cgo

package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops/nccl"
	"github.com/gohvd/gohvd/ops/tcp"
)

// These environment variables say which rank the process is, and how many there are.
const rankVariable, sizeVariable = "GOHVD_TEST_RANK", "GOHVD_TEST_SIZE"

// Every operation on tensors on devices gives the result of the reference if each rank is a process and NCCL
// moves the tensors. If the tensor of one rank is in host memory, all ranks get an error that names it, and
// the job goes on.
func TestConformanceNCCL(t *testing.T) {
	for _, ranks := range []int{1, 2, 3, 4} {
		t.Run(fmt.Sprintf("ranks=%d", ranks), func(t *testing.T) {
			outputs := runRanks(t, ranks, "TestRankOfNCCL")
			compareDigests(t, strings.Join(outputs, ""), 2)
			t.Log(regexp.MustCompile(`\d+ cases`).FindAllString(outputs[0], -1), "in event and lock-step mode")
		})
	}
}

// runRanks runs a test of this program in a process for each rank, and returns what each has written.
func runRanks(t *testing.T, ranks int, test string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*deviceTime())
	defer cancel()
	dir, commands, outputs := t.TempDir(), make([]*exec.Cmd, ranks), make([]bytes.Buffer, ranks)
	for r := range ranks {
		cmd := exec.CommandContext(ctx, os.Args[0], "-test.run", "^"+test+"$", "-test.v",
			"-test.timeout", "0", fmt.Sprintf("-full=%v", *full))
		cmd.Env = append(cmd.Environ(), rankVariable+"="+strconv.Itoa(r), sizeVariable+"="+strconv.Itoa(ranks),
			"HVD_INIT_METHOD=file://"+filepath.Join(dir, "store"))
		cmd.Stdout, cmd.Stderr = &outputs[r], &outputs[r]
		if err := cmd.Start(); err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
		commands[r] = cmd
	}
	var texts []string
	var failed error
	for r, cmd := range commands {
		if err := cmd.Wait(); err != nil {
			failed = errors.Join(failed, fmt.Errorf("rank %d: %w\n%s", r, err, &outputs[r]))
			cancel() // the other ranks may wait for this one
		}
		texts = append(texts, outputs[r].String())
	}
	if failed != nil {
		t.Fatal(failed)
	}
	return texts
}

// TestRankOfNCCL runs one rank of the trials on devices (TestConformanceNCCL).
func TestRankOfNCCL(t *testing.T) {
	if os.Getenv(rankVariable) == "" {
		t.Skip("TestConformanceNCCL starts a process for each rank")
	}
	me, err := strconv.Atoi(os.Getenv(rankVariable))
	if err != nil {
		t.Fatal(err)
	}
	size, err := strconv.Atoi(os.Getenv(sizeVariable))
	if err != nil {
		t.Fatal(err)
	}
	for _, lockstep := range []bool{false, true} {
		runRankOnDevice(t, topo.Rank(me), size, lockstep)
	}
}

// deviceTime limits the time of the trials of a rank in one mode of negotiation.
func deviceTime() time.Duration {
	if *full {
		return time.Hour
	}
	return clusterTime
}

// runRankOnDevice runs the trials of this process in a job of its own.
func runRankOnDevice(t *testing.T, me topo.Rank, size int, lockstep bool) {
	ctx, cancel := context.WithTimeout(t.Context(), deviceTime())
	defer cancel()
	cfg := config.Defaults()
	cfg.Rank, cfg.Size, cfg.SharedMemory = int(me), size, config.SharedNever
	cfg.InitMethod = fmt.Sprint(os.Getenv("HVD_INIT_METHOD"), lockstep)
	at, err := bootstrap.Open(ctx, bootstrap.Config{Settings: cfg})
	if err != nil {
		t.Fatal(err)
	}
	defer at.Close()
	o := testcluster.Options{Ranks: size, Deadline: deviceTime(),
		Process: &testcluster.Process{Rank: me, Mesh: transport.Alone{}}}
	var session *rank.Session
	if size > 1 {
		if session, err = rank.OpenSession(ctx, rank.SessionConfig{At: at}); err != nil {
			t.Fatal(err)
		}
		defer session.Close()
		o.Process.Mesh = session.Mesh
	}
	memory := openDevice(t, me, size)
	defer memory.close()
	o.Config = func(cfg *engine.Config) {
		if session != nil {
			cfg.Ready = session.Ready
		}
		cfg.Lockstep, cfg.Devices = lockstep, memory.library.Devices
		cfg.Backends = append(cfg.Backends, memory.library.Register(nccl.Config{
			Device: memory.device.Index(), StartTimeout: clusterTime,
			Host: tcp.Within(cfg.Mesh, transport.DeviceLane, tcp.Config{})}))
	}
	var heard *frames
	if me == 0 {
		heard = newFrames()
		o.OnFrame = heard.hear
	}
	runProcess(t, fmt.Sprint("in lock-step ", lockstep), o, trialsOnDevice(size, lockstep, memory), heard)
}

// trialsOnDevice returns the trials for jobs with the given number of ranks. Together with those for other
// numbers of ranks and the other mode of negotiation they cover each pair of values of any two parameters.
// With -full they cover more combinations, and a hash decides whether a trial is in lock-step, and whether
// the tensor of a rank is in host memory.
func trialsOnDevice(ranks int, lockstep bool, m memory) (scripts []*script) {
	counts := []int{1, 2, 3, 4}
	parts := elementCounts[:5] // the largest count takes most of the time
	aparts := []apart{noneApart, noneApart, firstOnHost, lastOnHost}
	if *full {
		for i, c := range everything(onDevices(operations()), ranks) {
			if (hash(uint64(i), 2)%2 == 1) == lockstep {
				c.apart = aparts[hash(uint64(i), 3)%4]
				scripts = append(scripts, c.script(m))
			}
		}
		return scripts
	}
	what := onDevices(unscaled(operations()))
	for i, row := range pairs([]int{len(what), len(counts), len(parts), len(modes), len(joinings), 2, 2,
		len(aparts), 2, len(factors)}) {
		if counts[row[1]] != ranks || (row[8] == 1) != lockstep {
			continue
		}
		scripts = append(scripts, trial{what: what[row[0]].scaled(factors[row[9]]), number: i, ranks: ranks,
			elements: parts[row[2]], mode: modes[row[3]], joining: joinings[row[4]], inPlace: row[5] == 1,
			wild: row[6] == 1, apart: aparts[row[7]]}.script(m))
	}
	return scripts
}

// onDevices returns the operations for tensors on devices. Of those that NCCL does not run, it returns one of
// eight.
func onDevices(operations []what) (all []what) {
	others := 0
	for _, w := range operations {
		w.device = true
		if w.kind.Reduces() && !w.byNCCL() {
			if others++; others%8 != 0 {
				continue
			}
		}
		all = append(all, w)
	}
	return all
}

// onDevice is the memory of a device for the tensors of this process.
type onDevice struct {
	t       *testing.T
	library *nccl.Library
	device  *cuda.Device
	// in fills the inputs, and an operation waits for it. out reads the results and waits for nothing.
	in, out *cuda.Stream
	mu      sync.Mutex
	placed  map[*testcluster.Op]*placed
}

// placed is an operation whose tensors are on the device.
type placed struct {
	memory [][]byte
	input  []byte // what is being copied to the device
}

// openDevice loads the libraries and chooses the device of a rank. Without a device for each rank, the ranks
// share the devices, so each must look to NCCL like a host of its own.
func openDevice(t *testing.T, me topo.Rank, size int) *onDevice {
	l, err := nccl.Load(testcuda.NCCL(), testcuda.CUDA())
	if err != nil {
		t.Fatal(err)
	}
	n, err := l.Count()
	if err != nil {
		t.Fatal(err)
	}
	if n < size {
		testcuda.ShareDevice(t, int(me))
	}
	m := &onDevice{t: t, library: l, placed: make(map[*testcluster.Op]*placed)}
	if m.device, err = l.CUDA.Device((int(me) + 1) % n); err == nil {
		m.in, err = m.device.NewStream()
	}
	if err == nil {
		m.out, err = m.device.NewStream()
	}
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *onDevice) close() {
	err := errors.Join(m.library.Close(), m.in.Close(), m.out.Close())
	if len(m.placed) > 0 && !m.t.Failed() {
		err = errors.Join(err, fmt.Errorf("the results of %d operations were not checked", len(m.placed)))
	}
	if err != nil {
		m.t.Error(err)
	}
}

// place implements memory.
func (m *onDevice) place(op *testcluster.Op, outBytes, in, out int) error {
	p := &placed{input: op.Input}
	alloc := func(n int) []byte {
		b, err := m.device.Alloc(n)
		if err != nil {
			m.t.Error(err)
		}
		p.memory = append(p.memory, b)
		return b
	}
	switch n := len(op.Input); {
	case in >= 0:
		op.Output = alloc(outBytes)
		op.Input = op.Output[in:][:n]
	case out >= 0:
		op.Input = alloc(n)
		op.Output = op.Input[out:][:outBytes]
	default:
		op.Input, op.Output = alloc(n), alloc(outBytes)
	}
	if err := m.in.Copy(op.Input, p.input); err != nil {
		return err
	}
	ready, err := m.library.Devices.Mark(m.device.Index(), m.in.Handle())
	if err != nil {
		return err
	}
	op.Device = &cuda.DevicePart{Ready: []*cuda.Event{ready}}
	op.Request.Device = tensor.CUDA(m.device.Index())
	m.mu.Lock()
	defer m.mu.Unlock()
	m.placed[op] = p
	return nil
}

// fetch implements memory.
func (m *onDevice) fetch(op *testcluster.Op) error {
	m.mu.Lock()
	p := m.placed[op]
	delete(m.placed, op)
	m.mu.Unlock()
	if op.Err != nil { // the operation need not have waited for the copy of the input
		if err := m.in.Synchronize(); err != nil {
			return err
		}
	}
	for _, b := range []*[]byte{&op.Input, &op.Output} {
		if *b == nil {
			continue
		}
		host := make([]byte, len(*b))
		if len(host) > 0 {
			if err := m.out.Copy(host, *b); err != nil {
				return err
			}
		}
		*b = host
	}
	if err := m.out.Synchronize(); err != nil {
		return err
	}
	for _, e := range op.Device.(*cuda.DevicePart).Ready {
		m.library.Devices.Release(e)
	}
	op.Device = nil
	var errs []error
	for _, b := range p.memory {
		errs = append(errs, m.device.Free(b))
	}
	return errors.Join(errs...)
}

// join implements memory.
func (m *onDevice) join(op *testcluster.Op) { op.Request.Device = tensor.CUDA(m.device.Index()) }
