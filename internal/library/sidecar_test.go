package library

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/ps/node"
	"github.com/gohvd/gohvd/internal/sidecar/client"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
)

// scratch is the folder of the sidecar that hvdd builds, or "".
var scratch string

func TestMain(m *testing.M) {
	code := m.Run()
	if scratch != "" {
		if err := os.RemoveAll(scratch); err != nil {
			panic(err)
		}
	}
	os.Exit(code)
}

// hvdd returns the path of the sidecar. It builds it once.
func hvdd(t *testing.T) string {
	path, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

var built = sync.OnceValues(func() (path string, err error) {
	if scratch, err = os.MkdirTemp("", "library"); err != nil {
		return "", err
	}
	return filepath.Join(scratch, "hvdd"), testnet.Link(scratch, "cmd/hvdd")
})

// newLibrary returns a Library that finds the sidecar at path.
func newLibrary(t *testing.T, path string) *Library {
	l := New(func() []string { return []string{filepath.Dir(path)} }, goMemory)
	t.Cleanup(func() {
		for _, c := range l.sidecars.byAddress {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return l
}

// must waits for the end of something that must succeed.
func must(t *testing.T, l *Library, h Handle) {
	t.Helper()
	if err := l.Wait(h, Forever, nil); err != nil {
		t.Fatal(err)
	}
}

// sum runs an allreduce of a job with one rank.
func sumOf(l *Library) error {
	x := []float32{1}
	o := sum("x", x, true)
	o.Spec.Postscale = 3
	_, err := l.Run(o, Forever, nil)
	if err == nil && x[0] != 3 {
		err = errors.New("the result is wrong")
	}
	return err
}

// TestSidecars runs jobs of one process in sidecars and in the process itself. A sidecar dies.
func TestSidecars(t *testing.T) {
	path := hvdd(t)
	l := newLibrary(t, path)
	at := func(sidecar string) InitOptions {
		return InitOptions{Settings: map[string]string{"HVD_SIZE": "1", "HVD_SIDECAR": sidecar}}
	}
	must(t, l, l.Init(at("spawn")))
	if l.Rank().Remote == nil {
		t.Error("the engine is in this process")
	}
	if err := sumOf(l); err != nil {
		t.Error(err)
	}
	first := l.sidecars.byAddress["spawn"]
	if err := syscall.Kill(first.Pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await := func(what string, done func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !done(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal(what)
			}
		}
	}
	await("the end of the sidecar is not noticed", func() bool { return l.Check() != nil })
	if err := sumOf(l); !isDead(err) || !strings.Contains(err.Error(), "SIGKILL") {
		t.Errorf("got error %v, want one that says how the sidecar has ended", err)
	}
	if err := l.Wait(l.Shutdown("", false), Forever, nil); !isDead(err) {
		t.Errorf("got error %v of the shutdown, want one that says how the sidecar has ended", err)
	}
	if id, err := l.NewUniqueID(at("spawn")); err != nil || id == "" {
		t.Errorf("got unique id %q and error %v", id, err)
	}
	timeline := filepath.Join(t.TempDir(), "timeline.json")
	for range 2 { // the second job uses the sidecar of the first one
		must(t, l, l.Init(at("spawn")))
		err := errors.Join(l.StartTimeline(timeline, false), sumOf(l), l.StopTimeline(), l.Check())
		if err != nil {
			t.Error(err)
		}
		if text, err := os.ReadFile(timeline); !strings.Contains(string(text), "ALLREDUCE") {
			t.Errorf("got the timeline %q and error %v", text, err)
		}
		must(t, l, l.Shutdown("", false))
	}
	must(t, l, l.Init(at("")))
	if l.Rank().Remote != nil {
		t.Error("the engine is in a sidecar")
	}
	must(t, l, l.Shutdown("", false))

	socket := filepath.Join(t.TempDir(), "hvdd.sock")
	c := exec.Command(path, "--socket", socket)
	c.Env, c.Stderr = append(os.Environ(), "HVD_SIZE=1"), os.Stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(c.Process.Signal(syscall.SIGTERM), c.Wait()); err != nil {
			t.Error(err)
		}
	}()
	await("the sidecar does not listen", func() bool {
		conn, err := net.Dial("unix", socket)
		return err == nil && conn.Close() == nil
	})
	must(t, l, l.Init(at("unix://"+socket)))
	if err := sumOf(l); err != nil {
		t.Error(err)
	}
	must(t, l, l.Shutdown("", false))

	comm := int32(1)
	o := at("spawn")
	o.MPIComm = &comm
	if err := l.Wait(l.Init(o), Forever, nil); !isUsage(err) {
		t.Errorf("got error %v with an MPI communicator, want a usage error", err)
	}
}

// TestFailureInSidecar lets the program fail, with the engine in this process and in a sidecar. The errors
// are the same.
func TestFailureInSidecar(t *testing.T) {
	l := newLibrary(t, hvdd(t))
	var texts [2]string
	for i, sidecar := range []string{"", "spawn"} {
		must(t, l, l.Init(InitOptions{Settings: map[string]string{"HVD_SIZE": "1", "HVD_SIDECAR": sidecar}}))
		err := l.Wait(l.Shutdown("its program raised E", true), Forever, nil)
		if err == nil {
			t.Fatal("the shutdown of a failed program has succeeded")
		}
		texts[i] = err.Error()
		if l.Rank() != nil {
			t.Error("the process is in a job after the shutdown")
		}
	}
	if texts[0] != texts[1] || !strings.Contains(texts[0], "raised E") {
		t.Errorf("in process: %s\nsidecar:    %s", texts[0], texts[1])
	}
}

// TestSidecarInElasticJob checks that a sidecar does not join an elastic job, and says what to do.
func TestSidecarInElasticJob(t *testing.T) {
	l := newLibrary(t, hvdd(t))
	t.Setenv("HVD_MEMBER", "host:0/1")
	err := l.Wait(l.Init(InitOptions{Settings: map[string]string{"HVD_SIDECAR": "spawn"}}), Forever, nil)
	if err == nil || !strings.Contains(err.Error(), "elastic job, which a sidecar cannot join: unset HVD_SIDECAR, or omit") {
		t.Errorf("got error %v, want one that says that a sidecar cannot join an elastic job", err)
	}
}

// TestGateInSidecar opens a gate while another goroutine waits for it and for an operation in a sidecar.
func TestGateInSidecar(t *testing.T) {
	path, method := hvdd(t), "file://"+filepath.Join(t.TempDir(), "job")
	all := []*Library{newLibrary(t, path), newLibrary(t, path)}
	var inits, handles []Handle
	for r, l := range all {
		inits = append(inits, l.Init(InitOptions{Settings: map[string]string{"HVD_SIDECAR": "spawn",
			"HVD_INIT_METHOD": method, "HOROVOD_RANK": strconv.Itoa(r), "HOROVOD_SIZE": "2"}}))
	}
	for r, l := range all {
		must(t, l, inits[r])
	}
	submit := func(l *Library) {
		h, err := l.Submit(sum("x", make([]float32, 1), true))
		if err != nil {
			t.Fatal(err)
		}
		handles = append(handles, h)
	}
	submit(all[0]) // it is not done before the other rank has submitted it too
	gate := all[0].NewGate()
	got := make(chan int)
	go func() {
		i, _ := all[0].WaitAny([]Handle{handles[0], gate}, Forever)
		got <- i
	}()
	testnet.Eventually(t, "the wait begins", func() bool {
		all[0].handles.mu.Lock()
		defer all[0].handles.mu.Unlock()
		return all[0].handles.slot(gate).users > 0
	})
	if err := all[0].Open(gate); err != nil {
		t.Fatal(err)
	}
	select {
	case i := <-got:
		if i != 1 {
			t.Errorf("the wait has ended for handle %d, want the gate", i)
		}
	case <-time.After(time.Minute):
		t.Error("the gate has not ended the wait")
	}
	submit(all[1])
	for r, l := range all {
		must(t, l, handles[r])
	}
	ends := []Handle{all[0].Shutdown("", false), all[1].Shutdown("", false)}
	for r, l := range all {
		must(t, l, ends[r])
	}
}

func isDead(err error) bool {
	_, is := errors.AsType[*client.DeadError](err)
	return is
}

func isUsage(err error) bool {
	_, is := errors.AsType[*engine.UsageError](err)
	return is
}

// TestNodeInSidecar pushes and pulls values with nodes of a parameter server in sidecars.
func TestNodeInSidecar(t *testing.T) {
	path, port := hvdd(t), strconv.Itoa(testnet.FreePort(t))
	var nodes sync.WaitGroup
	for _, role := range []string{"scheduler", "server", "worker"} {
		l := newLibrary(t, path)
		nodes.Go(func() {
			if err := serve(l, role, port); err != nil {
				t.Errorf("%s: %v", role, err)
			}
		})
	}
	nodes.Wait()
}

// serve runs a node.
func serve(l *Library, role, port string) error {
	err := l.Wait(l.StartNode(map[string]string{"HVD_SIDECAR": "spawn", "DMLC_ROLE": role, "DMLC_NUM_SERVER": "1",
		"DMLC_NUM_WORKER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port}), Forever, nil)
	if err != nil {
		return err
	}
	n, err := l.Node("test")
	if err != nil {
		return err
	}
	if want := map[string]int{"scheduler": 1, "server": 2, "worker": 4}[role]; n.Role() != want ||
		n.NumWorkers() != 1 || n.NumServers() != 1 || n.Rank() != 0 {
		return errors.New("the place of the node is wrong")
	}
	switch role {
	case "server":
		err = n.Serve(0, tensor.Float32, "sum", nil)
	case "worker":
		x := &node.Exchange{DType: tensor.Float32, Push: true, Pull: true, Keys: []uint64{7},
			Values: []byte{0, 0, 0x80, 0x3f}, Results: make([]byte, 4)}
		for i := range 2 {
			h, err := l.Exchange(x, i > 0)
			if err == nil {
				err = l.Wait(h, Forever, nil)
			}
			if err != nil {
				return err
			}
		}
		if string(x.Results) != "\x00\x00\x00\x40" {
			return errors.New("got other values than 2")
		}
		err = l.Wait(l.Clock(), Forever, nil)
	}
	return errors.Join(err, l.Wait(l.Finalize(true), Forever, nil))
}
