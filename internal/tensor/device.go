package tensor

import "strconv"

// Device says in which memory a tensor is: in the memory of the host (Host) or of a CUDA device of that host.
// Its values are sent on the wire.
type Device int32

// Host is the memory of the host. It is the zero value.
const Host Device = 0

// MaxCUDADevices is the maximum number of CUDA devices of a host.
const MaxCUDADevices = 1024

// CUDA returns the Device of the CUDA device with the given index, which is at least 0.
func CUDA(index int) Device { return Device(index + 1) }

// CUDA returns the index of the CUDA device. It returns false if the tensor is in host memory.
func (d Device) CUDA() (index int, ok bool) { return int(d) - 1, d != Host }

// Valid reports whether d is the host or a CUDA device with an index below MaxCUDADevices.
func (d Device) Valid() bool { return d >= Host && d <= MaxCUDADevices }

// String returns PyTorch's name of the device, such as "cpu" or "cuda:0".
func (d Device) String() string {
	if d == Host {
		return "cpu"
	}
	return "cuda:" + strconv.Itoa(int(d)-1)
}
