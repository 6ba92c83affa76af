package ps

import (
	"unsafe"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Value is the constraint for the types of values: integers of 8 to 64 bits except uint32 and uint64, floats
// of 32 and 64 bits, and the 16-bit floats of package half.
type Value interface {
	~uint8 | ~int8 | ~uint16 | ~int16 | ~int32 | ~int64 | ~float32 | ~float64 | half.Float16 | half.BFloat16
}

// wireTypes has the type on the wire for each element type.
var wireTypes = map[tensor.DType]pspb.DataType{
	tensor.Uint8: pspb.DataType_UINT8, tensor.Int8: pspb.DataType_INT8, tensor.Uint16: pspb.DataType_UINT16,
	tensor.Int16: pspb.DataType_INT16, tensor.Int32: pspb.DataType_INT32, tensor.Int64: pspb.DataType_INT64,
	tensor.Float32: pspb.DataType_FLOAT, tensor.Float64: pspb.DataType_DOUBLE,
	tensor.Float16: pspb.DataType_FLOAT16, tensor.BFloat16: pspb.DataType_BFLOAT16,
}

// keyBytes is the size of a key.
const keyBytes = 8

// bytesOfKeys returns the memory of keys as bytes.
func bytesOfKeys(keys []uint64) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(keys))), len(keys)*keyBytes)
}

// keysOfBytes returns b as keys. b must be aligned for them.
func keysOfBytes(b []byte) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/keyBytes)
}
