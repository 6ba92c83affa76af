package tensor_test

import (
	"testing"

	"github.com/gohvd/gohvd/internal/tensor"
)

func TestDevice(t *testing.T) {
	for _, c := range []struct {
		d     tensor.Device
		text  string
		index int
		cuda  bool
		valid bool
	}{
		{tensor.Host, "cpu", -1, false, true},
		{tensor.CUDA(0), "cuda:0", 0, true, true},
		{tensor.CUDA(tensor.MaxCUDADevices - 1), "cuda:1023", 1023, true, true},
		{tensor.CUDA(tensor.MaxCUDADevices), "cuda:1024", 1024, true, false},
		{-1, "cuda:-2", -2, true, false},
	} {
		index, cuda := c.d.CUDA()
		if c.d.String() != c.text || index != c.index || cuda != c.cuda || c.d.Valid() != c.valid {
			t.Errorf("device %d: got %v, index %d, %v, valid %v, want %+v", int32(c.d), c.d, index, cuda,
				c.d.Valid(), c)
		}
	}
}
