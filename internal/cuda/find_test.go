package cuda_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestPlaces checks that the libraries that torch has mapped are found first, and otherwise those in the
// packages of NVIDIA.
func TestPlaces(t *testing.T) {
	site := filepath.Join(t.TempDir(), "my env/lib/python3.12/site-packages")
	nccl := filepath.Join(site, "nvidia/nccl/lib/libnccl.so.2")
	cudart12, cudart13 := filepath.Join(site, "nvidia/cuda_runtime/lib/libcudart.so.12"),
		filepath.Join(site, "nvidia/cu13/lib/libcudart.so.13")
	for _, file := range []string{nccl, cudart12, cudart13} {
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		testnet.WriteFile(t, file, "")
	}
	line := func(file string) string {
		return fmt.Sprintf("7f1c2a000000-7f1c2a001000 r-xp 00000000 fe:01 1234                       %s\n", file)
	}
	other := line("") + line("[heap]") + line("/usr/lib/libc.so.6")
	torch := line(filepath.Join(site, "torch/lib/libtorch.so"))
	for _, c := range []struct {
		maps, pattern string
		want          []string
	}{
		{other, "libnccl.so.2", nil},
		{other + torch + torch, "libnccl.so.2", []string{nccl}},
		{other + line("/opt/libnccl.so.2") + line("/opt/libnccl.so.2") + torch, "libnccl.so.2",
			[]string{"/opt/libnccl.so.2", nccl}},
		{torch + line(cudart12), "libcudart.so.1?", []string{cudart12, cudart13}},
		{torch, "libcudart.so.1?", []string{cudart13, cudart12}},
	} {
		got := cuda.Places(strings.NewReader(c.maps), c.pattern)
		if len(got) != len(c.want) || !slices.Equal(got, c.want) {
			t.Errorf("%s in\n%s: got %q, want %q", c.pattern, c.maps, got, c.want)
		}
	}
}
