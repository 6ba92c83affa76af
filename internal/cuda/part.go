package cuda

// DevicePart is the part of a submitted operation that is about a CUDA device (tensorqueue.Entry).
type DevicePart struct {
	// Ready are events after the work that uses the input or the output of the operation.
	Ready []*Event
	// Streams are CUDA streams of the device of the tensor, as cudaStream_t. If there are some and a backend
	// runs the operation on the device, the operation is reported as complete as soon as the streams wait on
	// the device for its end. If it fails afterwards, the epoch fails.
	Streams []uintptr
}

// OnDevice marks a DevicePart as one.
func (*DevicePart) OnDevice() {}
