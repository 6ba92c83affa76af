//go:build nccl && cgo

package testcuda_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testcuda"
)

func TestMain(m *testing.M) { os.Exit(testcuda.Main(m)) }

// Each way to use the stand-ins wrongly ends the process with a message, and correct use does not.
func TestMisuse(t *testing.T) {
	program := filepath.Join(t.TempDir(), "misuse")
	libraries := filepath.Dir(testcuda.CUDA())
	out, err := exec.Command("gcc", "-Wall", "-Wextra", "-Werror", "-o", program, "standin/misuse.c",
		testcuda.NCCL(), testcuda.CUDA(), testcuda.Driver(), "-lpthread", "-Wl,-rpath,"+libraries).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for way, want := range map[string]string{
		"nothing":                                  "",
		"memory freed twice":                       "is not the beginning of an allocation",
		"memory that was freed":                    "is not in an allocation",
		"beyond the end":                           "reach beyond the end of the allocation of 4096 bytes",
		"wrong kind of copy":                       "kind 2 does not fit the memory",
		"stream destroyed twice":                   "cudaStreamDestroy: stream 0x",
		"event destroyed twice":                    "cudaEventDestroy: event 0x",
		"wrong current device":                     "the stream belongs to device 0, but the current device is 1",
		"event of another device":                  "the event belongs to device 1, and the stream to device 0",
		"memory of another device":                 "the memory is on device 1, and the communicator on device 0",
		"no order of copies":                       "cudaMemsetAsync on another stream writes, and nothing puts it before or after",
		"no order with a batch":                    "cudaMemcpyBatchAsync on another stream reads, and nothing puts it",
		"no order with the default stream":         "cudaMemsetAsync on another stream writes, and nothing puts it before or after",
		"stream that waits for the default stream": "a stream was made that waits for the default stream",
		"stream of each thread":                    "cudaMemsetAsync: stream 2 is another one in each thread",
		"default stream destroyed":                 "it is the default stream",
		"batch on the default stream":              "cudaMemcpyBatchAsync: the default stream cannot have it",
		"empty batch":                              "there are no copies",
		"batch without attributes":                 "0 attributes for 2 copies",
		"attributes for later copies":              "attributes 0 are for the copies from 1",
		"attributes without an order":              "srcAccessOrder is 0, want 1",
		"copy without bytes":                       "copy 1 has no bytes",
		"copies to the same place":                 "copy 0 writes what copy 1 uses",
		"copy of a copy":                           "copy 0 writes what copy 1 uses",
		"batch with memory that was freed":         "cudaMemcpyBatchAsync: 0x",
		"batch of an old runtime":                  "runtime 12060 and driver 12060 do not have it",
		"batch as in CUDA 12":                      "cudaMemcpyBatchAsync: stream 0x",
		"no order with an operation":               "ncclAllReduce on another stream writes, and nothing puts it before or after",
		"event before the work":                    "ncclAllReduce on another stream writes, and nothing puts it before or after",
		"group without end":                        "operations of the communicator wait for ncclGroupEnd",
		"messages without end":                     "operations of the communicator wait for ncclGroupEnd",
		"end without group":                        "ncclGroupEnd without ncclGroupStart",
		"use after abort":                          "ncclAllReduce: communicator 0x",
		"aborted twice":                            "ncclCommAbort: communicator 0x",
		"destroyed twice":                          "ncclCommDestroy: communicator 0x",
		"nonblocking":                              "each launch of a nonblocking communicator starts a thread",
		"two threads":                              "another thread is using the communicator",
		"reduction that does not exist":            "reduction 7 does not exist",
	} {
		t.Run(way, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			out, err := exec.CommandContext(ctx, program, way).CombinedOutput()
			if want == "" && (err != nil || len(out) > 0) {
				t.Errorf("got %v and %q, want success", err, out)
			}
			if want != "" && (err == nil || !strings.Contains(string(out), "stand-in: violation: ") ||
				!strings.Contains(string(out), want)) {
				t.Errorf("got %v and %q, want a violation: %s", err, out, want)
			}
		})
	}
}
