//go:build nccl && cgo

package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/nccl"
	"github.com/gohvd/gohvd/ops/tcp"
)

func TestMain(m *testing.M) { os.Exit(testcuda.Main(m)) }

// member is a rank of a process set. All ranks are in this process, each with a device of its own.
type member struct {
	t       *testing.T
	me, n   int
	library *nccl.Library
	order   uint64
	backend ops.Backend
	device  *cuda.Device
	stream  *cuda.Stream
	devices []tensor.Device // of all ranks
	mu      sync.Mutex
	memory  [][]byte
}

// load loads the stand-ins, which have a device for each of n ranks.
func load(t *testing.T, n int) *nccl.Library {
	t.Helper()
	t.Setenv("STANDIN_CUDA_DEVICES", fmt.Sprint(n))
	l, err := nccl.Load(testcuda.NCCL(), testcuda.CUDA())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// fusionBytes is the Config.FusionBytes of the backends of cluster.
var fusionBytes int

// cluster makes the backends of n ranks.
func cluster(t *testing.T, n int) []*member { return clusterOf(t, n, time.Minute) }

// clusterOf makes the backends of n ranks. NCCL must connect them within the given time.
func clusterOf(t *testing.T, n int, startTimeout time.Duration) []*member {
	t.Helper()
	meshes := mem.New(n)
	ranks, devices, all := make([]topo.Rank, n), make([]tensor.Device, n), make([]*member, n)
	for i := range n {
		ranks[i], devices[i] = topo.Rank(i), tensor.CUDA(i)
	}
	for i := range n {
		host := tcp.Register(meshes.Mesh(topo.Rank(i)), tcp.Config{})
		l := load(t, n)
		cfg := nccl.Config{Device: i, Host: host, StartTimeout: startTimeout, FusionBytes: fusionBytes}
		b, err := l.Register(cfg).New(0, ranks, i)
		if err != nil {
			t.Fatal(err)
		}
		d, err := l.CUDA.Device(i)
		if err != nil {
			t.Fatal(err)
		}
		s, err := d.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		all[i] = &member{t: t, me: i, n: n, library: l, backend: b, device: d, stream: s, devices: devices}
	}
	t.Cleanup(func() {
		var wg sync.WaitGroup
		for _, m := range all {
			wg.Go(func() {
				m.backend.Close()
				m.check(m.library.Close())
				for _, b := range m.memory {
					m.check(m.device.Free(b))
				}
				m.check(m.stream.Close())
				unused, total, err := m.device.Memory()
				if m.check(err); unused != total {
					t.Errorf("rank %d: %d bytes of its device were not freed", m.me, total-unused)
				}
			})
		}
		wg.Wait()
	})
	return all
}

func (m *member) check(err error) {
	if err != nil {
		m.t.Errorf("rank %d: %v", m.me, err)
	}
}

// alloc returns n bytes on the device of m.
func (m *member) alloc(n int) []byte {
	b, err := m.device.Alloc(n)
	m.check(err)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memory = append(m.memory, b)
	return b
}

// upload returns a copy of b on the device of m.
func (m *member) upload(b []byte) []byte {
	on := m.alloc(len(b))
	m.check(m.stream.Copy(on, b))
	m.check(m.stream.Synchronize())
	runtime.KeepAlive(b)
	return on
}

// download returns a copy of b in host memory.
func (m *member) download(b []byte) []byte {
	host := make([]byte, len(b))
	m.check(m.stream.Copy(host, b))
	m.check(m.stream.Synchronize())
	return host
}

// run runs op and returns its error.
func (m *member) run(op ops.Operation) error {
	if op.Device == nil {
		op.Device = new(ops.DevicePart)
	}
	op.Device.Devices, op.Device.Order = m.devices, m.order
	m.order++
	if op.Kind.Reduces() && op.Scaling == (ops.Scaling{}) {
		op.Scaling = ops.Scaling{Pre: 1, Post: 1}
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), time.Minute, errors.New("the test hangs"))
	defer cancel()
	return ops.Run(ctx, m.backend, op)
}

// each calls f for all ranks at once.
func each(all []*member, f func(m *member)) {
	var wg sync.WaitGroup
	for _, m := range all {
		wg.Go(func() { f(m) })
	}
	wg.Wait()
}

// floats returns n elements that rank r contributes.
func floats(r, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32((i*7+r*3)%19 - 5)
	}
	return v
}

// total returns the sum of the contributions of n ranks.
func total(n, length int) []float32 {
	sum := make([]float32, length)
	for r := range n {
		for i, v := range floats(r, length) {
			sum[i] += v
		}
	}
	return sum
}

func (m *member) equal(what string, on []byte, want []float32) {
	if got := tensor.View[float32](m.download(on)); !slices.Equal(got, want) {
		at := 0
		for at < len(got) && at < len(want) && got[at] == want[at] {
			at++
		}
		m.t.Errorf("rank %d of %d: %s: element %d of %d differs from the reference", m.me, m.n, what, at,
			len(want))
	}
}

// TestCopiesOfFusedTensors counts the calls of CUDA with which tensors are copied to the buffer on the device
// and back: one each, also for many tensors, if the runtime can. A single tensor is not copied.
func TestCopiesOfFusedTensors(t *testing.T) {
	for _, c := range []struct {
		version                string
		tensors, batch, single int
	}{{"12080", 50, 2, 0}, {"13000", 50, 2, 0}, {"12060", 50, 0, 100}, {"12080", 1, 0, 0}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			t.Setenv("STANDIN_CUDA_VERSION", c.version)
			m := cluster(t, 1)[0]
			tensors := make([]ops.Tensor, c.tensors)
			for i := range tensors {
				tensors[i].In = m.upload(tensor.Bytes(floats(i, i+1)))
				tensors[i].Out = m.alloc(4 * (i + 1))
			}
			calls := testcuda.Calls(t)
			m.check(m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
				Tensors: tensors}))
			if batch, single := calls("cudaMemcpyBatchAsync"), calls("cudaMemcpyAsync"); batch != c.batch ||
				single != c.single {
				t.Errorf("got %d batches and %d single copies", batch, single)
			}
			if n := calls("unaligned copy"); n > 0 {
				t.Errorf("%d copies are from or to a place that is no multiple of 16 bytes", n)
			}
			for i, x := range tensors {
				m.equal(fmt.Sprint("tensor ", i), x.Out, floats(i, i+1))
			}
		})
	}
}

// TestUrgentStream checks that the device begins the operations before other work of the program.
func TestUrgentStream(t *testing.T) {
	calls := testcuda.Calls(t)
	m := cluster(t, 1)[0]
	if n := calls("priority 0"); n != 1 {
		t.Errorf("got %d streams of the least priority, want that of the test", n)
	}
	buf := m.upload(tensor.Bytes(floats(0, 10)))
	m.check(m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
		Tensors: []ops.Tensor{{In: buf, Out: buf}}}))
	if n := calls("priority -5"); n != 1 {
		t.Errorf("got %d streams of the greatest priority, want that of NCCL", n)
	}
}

// TestLongNeutralElements checks that a rank that has joined contributes enough neutral elements, also if
// there are more of them than the host has.
func TestLongNeutralElements(t *testing.T) {
	all := cluster(t, 2)
	for _, length := range []int{1, 1024, 1025, 5000} {
		each(all, func(m *member) {
			op := ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Min,
				Device: &ops.DevicePart{NumBytes: int64(4 * length)}}
			if m.me == 1 {
				m.check(m.run(op))
				return
			}
			buf := m.upload(tensor.Bytes(floats(0, length)))
			op.Tensors = []ops.Tensor{{In: buf, Out: buf}}
			m.check(m.run(op))
			m.equal(fmt.Sprint(length, " elements"), buf, floats(0, length))
		})
	}
}

// TestDevicesChange checks that there is a communicator for each combination of devices: rank 0 has its
// tensors on one device and then on another.
func TestDevicesChange(t *testing.T) {
	t.Setenv("NCCL_HOSTID", "") // all ranks share a host
	meshes := mem.New(2)
	libraries := []*nccl.Library{load(t, 3), load(t, 3)}
	var wg sync.WaitGroup
	for me := range 2 {
		wg.Go(func() {
			ranks, l := []topo.Rank{0, 1}, libraries[me]
			defer l.Close()
			b, err := l.Register(nccl.Config{Device: me, StartTimeout: time.Minute,
				Host: tcp.Register(meshes.Mesh(topo.Rank(me)), tcp.Config{})}).New(0, ranks, me)
			if err != nil {
				t.Error(err)
				return
			}
			defer b.Close()
			for order, first := range []int{0, 2, 0} {
				devices := []tensor.Device{tensor.CUDA(first), tensor.CUDA(1)}
				index, _ := devices[me].CUDA()
				d, err := l.CUDA.Device(index)
				if err != nil {
					t.Error(err)
					return
				}
				s, err := d.NewStream()
				if err != nil {
					t.Error(err)
					return
				}
				m := &member{t: t, me: me, n: 2, order: uint64(order), backend: b, device: d, stream: s,
					devices: devices}
				buf := m.upload(tensor.Bytes(floats(me, 10)))
				m.check(m.run(ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
					Tensors: []ops.Tensor{{In: buf, Out: buf}}}))
				m.equal(fmt.Sprint("devices ", devices), buf, total(2, 10))
				m.check(d.Free(buf))
				m.check(s.Close())
			}
		})
	}
	wg.Wait()
}

func scaled(dt tensor.DType, op tensor.ReduceOp, pre, post float64) message.Response {
	return message.Response{Kind: message.Allreduce, DType: dt, Op: op, Prescale: pre, Postscale: post}
}

func TestPlan(t *testing.T) {
	plan := load(t, 1).Register(nccl.Config{}).Plan
	for _, c := range []struct {
		r    message.Response
		want string
	}{
		{message.Response{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Average, Prescale: 2,
			Postscale: 1}, ""},
		{message.Response{Kind: message.Broadcast, DType: tensor.Int16}, ""},
		{message.Response{Kind: message.Allreduce, DType: tensor.Int16, Op: tensor.Sum, Prescale: 1,
			Postscale: 1},
			"NCCL has no type for int16"},
		{message.Response{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Adasum, Prescale: 1,
			Postscale: 1}, "NCCL has no adasum"},
		{message.Response{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Max, Prescale: 1,
			Postscale: 2}, "NCCL scales only sums and averages of floats"},
		{message.Response{Kind: message.Reducescatter, DType: tensor.Int32, Op: tensor.AverageActive,
			Prescale: 1, Postscale: 1}, "NCCL divides integers only by the number of all ranks"},
		{message.Response{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum, Prescale: 1,
			Postscale: 1, Wire: tensor.Float16}, "tensors on a device are not compressed"},
		{scaled(tensor.Float16, tensor.Sum, 0.5, 2), "would undo the prescale"},
		{scaled(tensor.Float32, tensor.Sum, 0.5, 2), ""},
		{scaled(tensor.Float16, tensor.Sum, 5e-5, 1), "is no normal number of type float16"},
		{scaled(tensor.Float16, tensor.Average, 1e-4, 1), "NCCL multiplies by 5e-05"},
		{scaled(tensor.Float16, tensor.Sum, 1e5, 1), "is no normal number of type float16"},
		{scaled(tensor.BFloat16, tensor.Sum, 1e-4, 1), ""},
		{scaled(tensor.Float32, tensor.Sum, 0, 1), "NCCL multiplies by 0, the product of all factors"},
		{scaled(tensor.Float32, tensor.Sum, 1e-39, 1), "is no normal number of type float32"},
		{scaled(tensor.Float64, tensor.Sum, 1e-39, 1), ""},
		{scaled(tensor.Float64, tensor.Sum, math.Inf(1), 1), "is no normal number of type float64"},
	} {
		_, err := plan([]topo.Rank{0, 1}, &c.r, 4, nil)
		if c.want == "" && err != nil {
			t.Errorf("%+v: got %v", c.r, err)
		}
		if c.want != "" {
			testnet.WantError(t, err, c.want)
		}
	}
}

// TestLateDevices checks that Load does not look for devices, so that a program can set CUDA_VISIBLE_DEVICES
// after Init.
func TestLateDevices(t *testing.T) {
	l := load(t, 3)
	t.Setenv("STANDIN_CUDA_DEVICES", "1")
	if n, err := l.Count(); n != 1 || err != nil {
		t.Errorf("got %d devices and %v, want 1", n, err)
	}
}

func TestLoadFails(t *testing.T) {
	_, err := nccl.Load(testcuda.OldNCCL(), testcuda.CUDA())
	testnet.WantError(t, err, "has version 2.23.4, want at least 2.14: it lacks ncclGetLastError, "+
		"ncclCommInitRankConfig, ncclRedOpCreatePreMulSum, ncclRedOpDestroy")
	_, err = nccl.Load("", "/no/such/libcudart.so")
	testnet.WantError(t, err, "no library could be loaded")
	t.Setenv("STANDIN_CUDA_DRIVER", "11080")
	_, err = nccl.Load(testcuda.NCCL(), testcuda.CUDA())
	testnet.WantError(t, err, "has version 12.8, but the driver supports CUDA only up to 11.8")
	t.Setenv("STANDIN_CUDA_DRIVER", "12000")
	_, err = load(t, 0).Count()
	testnet.WantError(t, err, "has version 2.23.4, but this host has no CUDA device")
	t.Setenv("STANDIN_CUDA_NO_DEVICE", "802")
	_, err = load(t, 0).Count()
	testnet.WantError(t, err, "no CUDA device", "cudaGetDeviceCount: system not yet initialized "+
		"(cudaErrorSystemNotReady, 802)")
	if found := nccl.Find(testcuda.NCCL(), testcuda.CUDA(), true); !strings.Contains(found.NoDevice, "802") {
		t.Errorf("got %+v, want the reason why there is no device", found)
	}
}

// TestFaults checks that each fault ends in an error at every rank, and that Close does not hang afterwards.
// Rank 1 has the fault. In a job, the verdict ends the operations of the other ranks.
func TestFaults(t *testing.T) {
	gaveUp := errors.New("the caller gave up")
	for fault, want := range map[string]string{
		"async:1:2":  "the communicator: remote process exited or there was a network error (6)",
		"refuse:1:2": "ncclAllReduce: internal error (3): NCCL's last message: the test asked for this error",
		"hang:1:2":   "", // the caller gives up
		"init:1":     "",
	} {
		t.Run(fault, func(t *testing.T) {
			t.Setenv("STANDIN_NCCL_FAULT", fault)
			if fault == "init:1" {
				t.Setenv("STANDIN_NCCL_INIT_SECONDS", "3") // Close waits for it
			}
			all := cluster(t, 2)
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			switch fault {
			case "hang:1:2":
				defer cancelAfterLaunch(t, all, func() { cancel(gaveUp) })()
			case "init:1":
				time.AfterFunc(200*time.Millisecond, func() { cancel(gaveUp) })
			}
			each(all, func(m *member) {
				buf := m.upload(tensor.Bytes(floats(m.me, 10)))
				op := ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
					Device: &ops.DevicePart{Devices: m.devices}, Scaling: ops.Scaling{Pre: 1, Post: 1},
					Tensors: []ops.Tensor{{In: buf, Out: buf}}}
				err := ops.Run(ctx, m.backend, op)
				if op.Device.Order++; err == nil {
					err = ops.Run(ctx, m.backend, op)
				}
				if m.me == 1 && want != "" {
					testnet.WantError(t, err, "ops/nccl: allreduce: ", want)
					cancel(gaveUp)
				}
				// A rank learns of a failure by the verdict, or because another rank has aborted its
				// communicator.
				unknown, ok := errors.AsType[*ops.UnknownRankError](err)
				if !ok && !errors.Is(err, gaveUp) || ok && len(unknown.Ranks) != 2 {
					t.Errorf("rank %d: got %v", m.me, err)
				}
				testnet.WantError(t, m.backend.Start(op), "the backend has failed before")
			})
		})
	}
}

// TestFind checks what Find reports about the stand-ins, an old NCCL, and missing libraries.
func TestFind(t *testing.T) {
	for _, c := range []struct{ nccl, cuda, devices, code, version, wrong string }{
		{testcuda.NCCL(), testcuda.CUDA(), "2", "22809", "2.28.9", ""},
		{testcuda.NCCL(), testcuda.CUDA(), "0", "21403", "2.14.3", ""},
		{testcuda.OldNCCL(), testcuda.CUDA(), "2", "2708", "2.7.8", "want at least 2.14: it lacks "},
		{"/none/libnccl.so.2", "/none/libcudart.so", "2", "", "", "/none/libnccl.so.2: cannot open"},
	} {
		t.Setenv("STANDIN_CUDA_DEVICES", c.devices)
		t.Setenv("STANDIN_NCCL_VERSION", c.code)
		found := nccl.Find(c.nccl, c.cuda, true)
		want := cuda.Found{Built: true, NCCL: found.NCCL, CUDA: found.CUDA}
		if c.devices == "0" {
			want.NoDevice = "cuda: cudaGetDeviceCount: no CUDA-capable device is detected (cudaErrorNoDevice, 100)"
		}
		if c.version != "" {
			want.Driver, want.NCCL.File, want.CUDA.File = found.CUDA.Version, c.nccl, c.cuda
			want.Devices = int(c.devices[0] - '0')
		}
		if found != want || found.NCCL.Version != c.version ||
			!strings.Contains(found.NCCL.Error, c.wrong) || (found.NCCL.Error == "") != (c.wrong == "") ||
			(found.CUDA.Error == "") != (c.version != "") {
			t.Errorf("%v: got %+v", c, found)
		}
		want.Devices, want.NoDevice = 0, ""
		if found := nccl.Find(c.nccl, c.cuda, false); found != want {
			t.Errorf("%v: got %+v without the devices, want %+v", c, found, want)
		}
	}
}
