//go:build nccl && cgo

package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
	"github.com/gohvd/gohvd/internal/testcuda"
)

// The numbers of the arenas of a gpu.
const (
	eventArena  = 100
	memoryArena = 200
	memoryBytes = 8192
)

// gpu is a client that has a device, an event, and memory of the device. Its sidecar has opened the event and
// the memory.
type gpu struct {
	*sidecartest.Client
	t      *testing.T
	rank   int
	hvdd   *process
	ipc    *cuda.IPC
	device *cuda.Device
	busID  string
	stream *cuda.Stream
	event  *cuda.Event
	memory []byte
	kept   [][]byte // what the stream copies
}

// gpus starts a job of n ranks with a sidecar each, and calls f concurrently for all ranks.
func gpus(t *testing.T, n int, f func(g *gpu)) {
	t.Helper()
	t.Setenv("STANDIN_CUDA_DELAY_US", "5000")
	all := make([]*gpu, n)
	for r := range all {
		p, c := pair(t)
		c.Hello()
		all[r] = &gpu{Client: c, t: t, rank: r, hvdd: p}
	}
	id := all[0].Must(sidecartest.NewUniqueID()).GetUniqueId().GetText()
	var wg sync.WaitGroup
	for r, g := range all {
		wg.Go(func() {
			ready := g.Must(sidecartest.Init(map[string]string{
				"HVD_UNIQUE_ID": id, "HOROVOD_RANK": fmt.Sprint(r), "HOROVOD_SIZE": fmt.Sprint(n),
				"HOROVOD_GPU_OPERATIONS": "nccl", "HVD_NCCL_LIBRARY": testcuda.NCCL(),
				"HVD_CUDART_LIBRARY": testcuda.CUDA(),
			})).GetReady()
			if !ready.Devices {
				t.Error("the rank says that it has no devices")
			}
			g.open()
			f(g)
		})
	}
	wg.Wait()
}

func (g *gpu) check(errs ...error) {
	for _, err := range errs {
		if err != nil {
			g.t.Errorf("rank %d: %v", g.rank, err)
		}
	}
}

// open makes the event and the memory, and gives the sidecar access to them.
func (g *gpu) open() {
	r, err := cuda.Load(testcuda.CUDA())
	g.check(err)
	g.device, err = r.Device(g.rank + 1)
	g.check(err)
	g.ipc, err = cuda.NewIPC(r)
	g.check(err)
	g.busID, err = g.device.BusID()
	g.check(err)
	g.stream, err = g.device.NewStream()
	g.check(err)
	g.event, err = g.ipc.NewEvent(g.device)
	g.check(err)
	g.memory, err = g.device.Alloc(memoryBytes)
	g.check(err)
	h, err := g.ipc.ExportEvent(g.event)
	g.check(err)
	g.Must(sidecartest.DeviceEvent(eventArena, g.busID, h[:]))
	h, err = g.ipc.ExportMemory(g.device, g.memory)
	g.check(err)
	g.Must(sidecartest.DeviceMemory(memoryArena, g.busID, h[:], memoryBytes))
}

// close leaves the job. The sidecar closes the memory and the event before the client frees them.
func (g *gpu) close() {
	g.Must(sidecartest.DropArena(memoryArena))
	g.Must(sidecartest.DropArena(eventArena))
	g.check(g.event.Close(), g.device.Free(g.memory), g.stream.Close())
	g.Shutdown()
	g.Bye()
	g.hvdd.wants(0, "")
}

// write enqueues a slow copy of numbers to the memory from byte at, and records the event after it.
func (g *gpu) write(at int, x ...float32) {
	b := make([]byte, 0, 4*len(x))
	for _, v := range x {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	g.kept = append(g.kept, b)
	g.check(g.stream.Fill(g.memory, 0xff), g.stream.Copy(g.memory[at:at+len(b)], b), g.event.Record(g.stream))
}

// want checks n numbers in the memory, from byte at. It reads them after the event.
func (g *gpu) want(what string, at int, want ...float32) {
	g.t.Helper()
	b := make([]byte, 4*len(want))
	g.check(g.stream.Wait(g.event), g.stream.Copy(b, g.memory[at:at+len(b)]), g.stream.Synchronize())
	got := make([]float32, len(want))
	for i := range got {
		got[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	if !slices.Equal(got, want) {
		g.t.Errorf("rank %d: %s: got %v, want %v", g.rank, what, got, want)
	}
}

// on returns an operation on tensors of float32 with a dimension of rows. ranges has the input and the output
// of each tensor: the first byte and the number of elements.
func on(kind uint32, name string, ranges ...[2]int) *sidecarpb.Operation {
	o := &sidecarpb.Operation{Kind: kind, Name: name, Dtype: 9, Event: eventArena}
	at := func(r [2]int) *sidecarpb.Memory {
		return &sidecarpb.Memory{Arena: memoryArena, Offset: uint64(r[0]), Bytes: uint64(4 * r[1])}
	}
	for i := 0; i < len(ranges); i += 2 {
		o.Tensors = append(o.Tensors, &sidecarpb.Tensor{Shape: []int64{int64(ranges[i][1])},
			Input: at(ranges[i]), Output: at(ranges[i+1])})
	}
	return o
}

// TestDevices runs operations on memory of devices that the clients have exported. The memory is still being
// written when an operation is submitted.
func TestDevices(t *testing.T) {
	gpus(t, 2, func(g *gpu) {
		me := float32(g.rank)
		sum := on(1, "sum", [2]int{4096, 3}, [2]int{4096, 3})
		sum.ReduceOp = 2
		for range 3 {
			g.write(4096, me, 2, 3)
			g.MustRun(sum)
			g.want("allreduce in place", 4096, 1, 4, 6)
		}
		g.write(0, me, 10)
		average := on(1, "average", [2]int{0, 2}, [2]int{64, 2})
		average.ReduceOp = 1
		g.MustRun(average)
		g.want("allreduce", 0, me, 10)
		g.want("allreduce", 64, 0.5, 10)

		g.write(0, 1, me)
		group := on(1, "group", [2]int{0, 1}, [2]int{0, 1}, [2]int{4, 1}, [2]int{8, 1})
		group.Grouped, group.ReduceOp = true, 2
		g.MustRun(group)
		g.want("grouped allreduce", 0, 2, me, 1)

		g.write(0, me, math.Float32frombits(1)) // 1 and 0 of int16, which NCCL does not have
		types := on(1, "types", [2]int{0, 1}, [2]int{0, 1}, [2]int{4, 1}, [2]int{4, 1})
		types.Grouped, types.ReduceOp = true, 2
		types.Tensors[1].Dtype, types.Tensors[1].Shape[0] = 4, 2
		g.MustRun(types)
		g.want("grouped allreduce of two types", 0, 1, math.Float32frombits(2))

		g.write(0, me, 5+me)
		b := on(3, "broadcast", [2]int{0, 2}, [2]int{0, 2})
		b.RootRank = 1
		g.MustRun(b)
		g.want("broadcast", 0, 1, 6)

		g.write(128, 1+me)
		g.MustRun(on(2, "allgather", [2]int{128, 1}, [2]int{0, 2}))
		g.want("allgather", 0, 1, 2)

		g.write(0, 1, 2, 3)
		rs := on(5, "reducescatter", [2]int{0, 3}, [2]int{64, 2 - g.rank})
		rs.ReduceOp = 2
		g.MustRun(rs)
		g.want("reducescatter", 64, [][]float32{{2, 4}, {6}}[g.rank]...)

		g.write(0, 10*me, 10*me+1)
		g.MustRun(on(4, "alltoall", [2]int{0, 2}, [2]int{64, 2}))
		g.want("alltoall", 64, me, 10+me)
		g.close()
	})
}

// TestDeviceErrors makes requests that a sidecar refuses. The job goes on.
func TestDeviceErrors(t *testing.T) {
	gpus(t, 1, func(g *gpu) {
		refused := func(what string, r *sidecarpb.Reply, says string) {
			t.Helper()
			if r.Error.GetClass() != 1 || !strings.Contains(r.Error.GetText(), says) {
				t.Errorf("%s: got %v, want an error of class 1 with %q", what, r.Error, says)
			}
		}
		h, err := g.ipc.ExportMemory(g.device, g.memory)
		g.check(err)
		refused("a number twice", g.Call(sidecartest.DeviceMemory(memoryArena, g.busID, h[:], memoryBytes)),
			"arena 200 already exists")
		refused("no size", g.Call(sidecartest.DeviceMemory(1, g.busID, h[:], 0)), "arena 1 of 0 bytes")
		refused("a short handle", g.Call(sidecartest.DeviceMemory(1, g.busID, h[:9], 4096)),
			"got handles of 9 and 0 bytes for memory and for an event, want one of 64 bytes")
		refused("no handle", g.Call(sidecartest.DeviceEvent(1, g.busID, nil)), "got handles of 0 and 0 bytes")
		refused("a wrong handle", g.Call(sidecartest.DeviceMemory(1, g.busID, make([]byte, 64), 4096)),
			"cudaIpcOpenMemHandle: invalid argument")
		refused("memory as event", g.Call(sidecartest.DeviceEvent(1, g.busID, h[:])),
			"cudaIpcOpenEventHandle: invalid argument")
		refused("no such device", g.Call(sidecartest.DeviceEvent(1, "0000:77:00.0", h[:])),
			`no device "0000:77:00.0"`)

		g.Arena(1, 4096)
		at := [2]int{0, 1}
		o := on(1, "x", at, at)
		for what, c := range map[string]struct {
			change func(o *sidecarpb.Operation)
			says   string
		}{
			"no event": {func(o *sidecarpb.Operation) { o.Event = 0 },
				"arena 200 is on CUDA device 1, but the operation has no event"},
			"another event": {func(o *sidecarpb.Operation) { o.Event = 7 }, "arena 7 does not exist"},
			"no such event": {func(o *sidecarpb.Operation) { o.Event = memoryArena }, "arena 200 is no event"},
			"host memory": {func(o *sidecarpb.Operation) { o.Tensors[0].Input.Arena = 1 },
				"arena 1 is in memory of the host, but the event is of CUDA device 1"},
			"an event as memory": {func(o *sidecarpb.Operation) { o.Tensors[0].Input.Arena = eventArena },
				"arena 100 is an event and has no memory"},
			"beyond the end": {func(o *sidecarpb.Operation) { o.Tensors[0].Input.Offset = memoryBytes },
				"which has only 8192 bytes"},
			"no output": {func(o *sidecarpb.Operation) { o.Tensors[0].Output = nil },
				"the sidecar does not allocate memory of CUDA devices"},
			"a barrier": {func(o *sidecarpb.Operation) { o.Kind, o.Tensors, o.Dtype = 6, nil, 0 },
				"this operation has no tensor on a device"},
			"a message": {func(o *sidecarpb.Operation) { o.Kind, o.Name = 14, "" },
				"this operation has no tensor on a device"},
		} {
			o := on(1, "x", at, [2]int{64, 1})
			c.change(o)
			refused(what, g.Run(o), c.says)
		}

		g.write(0, 1)
		g.MustRun(o)
		g.want("allreduce", 0, 1)
		g.close()
	})
}

// TestDeviceEvents gives the sidecar more events than it may have arenas, and removes them.
func TestDeviceEvents(t *testing.T) {
	gpus(t, 1, func(g *gpu) {
		h, err := g.ipc.ExportEvent(g.event)
		g.check(err)
		const first, n = 1000, 5000
		for i := range uint32(n) {
			g.Must(sidecartest.DeviceEvent(first+i, g.busID, h[:]))
		}
		g.Arena(1, 4096)
		g.write(0, 1)
		o := on(1, "x", [2]int{0, 1}, [2]int{64, 1})
		o.Event = first + n - 1
		g.MustRun(o)
		for i := range uint32(n) {
			g.Must(sidecartest.DropArena(first + i))
		}
		g.close()
	})
}

// TestDeviceClientDies ends a client in the middle of an operation on its device.
func TestDeviceClientDies(t *testing.T) {
	gpus(t, 2, func(g *gpu) {
		at := [2]int{0, 1}
		g.write(0, 1)
		if g.rank == 1 {
			g.Close()
			g.hvdd.wants(1, "ended during the job")
			return
		}
		if r := g.Run(on(1, "x", at, at)); r.Error.GetClass() != 4 ||
			!slices.Equal(r.Error.Ranks, []int32{1}) {
			t.Errorf("got %v, want the failure of rank 1", r.Error)
		}
	})
}

// TestDeviceCheckGPUs checks what --check-gpus says about the stand-ins, an old NCCL, and missing libraries.
func TestDeviceCheckGPUs(t *testing.T) {
	for _, c := range []struct{ nccl, cuda, devices, code, version, wrong string }{
		{testcuda.NCCL(), testcuda.CUDA(), "2", "22809", "2.28.9", ""},
		{testcuda.NCCL(), testcuda.CUDA(), "0", "21403", "2.14.3", ""},
		{testcuda.OldNCCL(), testcuda.CUDA(), "2", "2708", "2.7.8", "want at least 2.14: it lacks "},
		{"/none/libnccl.so.2", "/none/libcudart.so", "2", "", "", "/none/libnccl.so.2: cannot open"},
	} {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), self, "--check-gpus")
		cmd.Env = append(os.Environ(), asDaemon+"=1", "HVD_NCCL_LIBRARY="+c.nccl, "HVD_CUDART_LIBRARY="+c.cuda,
			"STANDIN_CUDA_DEVICES="+c.devices, "STANDIN_NCCL_VERSION="+c.code)
		out, err := cmd.Output()
		var found cuda.Found
		if err == nil {
			err = json.Unmarshal(out, &found)
		}
		if err != nil {
			t.Fatalf("%v: %v and %s", c, err, out)
		}
		want := cuda.Found{Built: true, NCCL: found.NCCL, CUDA: found.CUDA}
		if c.version != "" {
			want.Driver, want.NCCL.File, want.CUDA.File = found.CUDA.Version, c.nccl, c.cuda
			want.Devices = int(c.devices[0] - '0')
		}
		if found != want || found.NCCL.Version != c.version ||
			!strings.Contains(found.NCCL.Error, c.wrong) || (found.NCCL.Error == "") != (c.wrong == "") ||
			(found.CUDA.Error == "") != (c.version != "") {
			t.Errorf("%v: got %s", c, out)
		}
	}
}
