//go:build nccl && cgo

package main

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// devicePath implements the interface path with package hvd. Its allreduces run on tensors of a CUDA device.
type devicePath struct {
	negotiated
	device *cuda.Device
	stream *cuda.Stream
}

// openDevice returns a devicePath for the device with the number of this rank among the ranks of its host. If
// there are fewer devices, ranks share them. library is the file of the CUDA runtime, or empty.
func openDevice(p negotiated, library string) (path, func() error, error) {
	r, err := cuda.Load(library)
	if err != nil {
		return nil, nil, err
	}
	n, err := r.Count()
	if err != nil {
		return nil, nil, fmt.Errorf("this host has no CUDA device: %w", err)
	}
	d := &devicePath{negotiated: p}
	if d.device, err = r.Device(p.LocalRank() % n); err == nil {
		d.stream, err = d.device.NewStream()
	}
	if err != nil {
		return nil, nil, err
	}
	return d, d.stream.Close, nil
}

// deviceTensors implements remote. input and output are on the device.
type deviceTensors struct {
	path          *devicePath
	buf           []byte // the input in host memory
	result        []byte // the output in host memory
	input, output []byte
}

// copy copies memory between the device and the host, or on the device, and waits for it.
func (p *devicePath) copy(to, from []byte) error {
	if len(to) == 0 {
		return nil
	}
	return errors.Join(p.stream.Copy(to, from), p.stream.Synchronize())
}

func (t *deviceTensors) load() error  { return t.path.copy(t.input, t.buf) }
func (t *deviceTensors) fetch() error { return t.path.copy(t.result, t.output) }

func (t *deviceTensors) free() error {
	err := t.path.device.Free(t.input)
	if unsafe.SliceData(t.output) != unsafe.SliceData(t.input) {
		err = errors.Join(err, t.path.device.Free(t.output))
	}
	return err
}

// tensors allocates tensors on the device with the size of buf. In place, they are the same.
func (p *devicePath) tensors(buf []byte, inPlace bool) (t *deviceTensors, err error) {
	t = &deviceTensors{path: p, buf: buf, result: make([]byte, len(buf))}
	if t.input, err = p.device.Alloc(len(buf)); err != nil {
		return nil, err
	}
	t.output = t.input
	if !inPlace {
		if t.output, err = p.device.Alloc(len(buf)); err != nil {
			return nil, errors.Join(err, p.device.Free(t.input))
		}
	}
	return t, nil
}

func (p *devicePath) prepare(s opSpec, name string, buf []byte) (*action, error) {
	if s.kind != message.Allreduce {
		return p.negotiated.prepare(s, name, buf)
	}
	of, ok := typed[s.dt]
	if !ok {
		return nil, errUnsupported{fmt.Sprintf("package hvd has no element type %v", s.dt)}
	}
	t, err := p.tensors(buf, s.inPlace)
	if err != nil {
		return nil, err
	}
	return &action{
		run: of.onDevice(p.Engine, s, name, deviceOperation{address(t.input), address(t.output), len(buf),
			p.device.Index(), p.stream.Handle()}),
		result: func() []byte { return t.result },
		ran:    func() (ways, error) { return p.ran(name) },
		remote: t,
	}, nil
}

// prepareCopy prepares a copy of numBytes bytes on the device, with which an operation can be compared.
func (p *devicePath) prepareCopy(numBytes int64) (*action, error) {
	t, err := p.tensors(make([]byte, numBytes), false)
	if err != nil {
		return nil, err
	}
	return &action{
		run:    func(context.Context) error { return p.copy(t.output, t.input) },
		ran:    func() (ways, error) { return ways{"cudaMemcpyAsync"}, nil },
		remote: t,
	}, nil
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// step implements path. check has refused steps on devices.
func (p *devicePath) step(mode stepMode, _ tensor.DType, _, _ []named) (*action, error) {
	return nil, errUnsupported{fmt.Sprintf("a step in mode %v on a device", mode)}
}
