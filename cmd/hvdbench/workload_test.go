package main

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
)

func TestBuiltInWorkloads(t *testing.T) {
	for name, want := range map[string]struct {
		tensors int
		elems   int64
		first   string
	}{"resnet50": {161, 25557032, "fc.bias"}, "gpt2": {148, 124439808, "ln_f.bias"}} {
		w, err := openWorkload(name)
		if err != nil {
			t.Fatal(err)
		}
		if len(w.gradients) != want.tensors || w.numElems() != want.elems ||
			w.gradients[0].name != want.first {
			t.Errorf("%s: %d tensors of %d elements, the first %s; want %v", name, len(w.gradients),
				w.numElems(), w.gradients[0].name, want)
		}
	}
}

func TestWorkloadFiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mine.txt")
	testnet.WriteFile(t, file, "# a model\na 6 2x3\n\nb 4\n")
	w, err := openWorkload(file)
	if err != nil || w.name != "mine" || !slices.Equal(w.gradients, []gradient{{"b", 4}, {"a", 6}}) {
		t.Errorf("got %+v and error %v, want b before a", w, err)
	}
	for text, want := range map[string]string{
		"a":                "line 1",
		"a x":              `got "x"`,
		"a 6 2x3\na 6":     "line 2: tensor \"a\" occurs twice",
		"a 6 2x4":          "does not have 6 elements",
		"a -1":             `got "-1"`,
		"a 99999999999999": "number of elements",
		"":                 "no tensor",
	} {
		if _, err := readWorkload("w", strings.NewReader(text)); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: got error %v, want one with %q", text, err, want)
		}
	}
	if _, err := openWorkload("resnet51"); err == nil || !strings.Contains(err.Error(), "resnet50, gpt2") {
		t.Errorf("got error %v, want one that names the built-in workloads", err)
	}
	if _, err := manyTensors(many{3, 6}, tensor.Float32); err == nil {
		t.Error("tensors of 6 bytes were accepted as float32")
	}
}

// TestBuckets checks at which tensors the buckets begin. Some tensors fit together in a bucket, and one
// tensor is larger than a bucket.
func TestBuckets(t *testing.T) {
	var tensors []named
	for _, mib := range []int{10, 10, 6, 30, 1, 24, 1} {
		tensors = append(tensors, named{buf: make([]byte, mib<<20)})
	}
	if got, want := buckets(tensors), []int{0, 2, 3, 4, 6, 7}; !slices.Equal(got, want) {
		t.Errorf("buckets begin at %v, want %v", got, want)
	}
}

// FuzzReadWorkload passes arbitrary lists to readWorkload. readWorkload must refuse a list, or return at
// least one tensor and no tensor of negative size.
func FuzzReadWorkload(f *testing.F) {
	f.Add("a 12 3x4 # comment\nb 5\n")
	f.Add("a -1\na 99999999999999999999 1x1\n")
	f.Fuzz(func(t *testing.T, text string) {
		w, err := readWorkload("x", strings.NewReader(text))
		if err == nil && (len(w.gradients) == 0 || w.numElems() < 0) {
			t.Errorf("%q was read as %+v", text, w)
		}
	})
}
