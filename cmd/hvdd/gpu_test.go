//go:build !nccl || !cgo

package main

import (
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
)

// install copies this test binary, which then is an hvdd without NCCL, to a new folder under the given name.
// It returns the command that runs it.
func install(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	from, err := os.Open(self)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	path := filepath.Join(t.TempDir(), name)
	to, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o755)
	if err == nil {
		if _, err = io.Copy(to, from); err == nil {
			err = to.Close()
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Env = append(os.Environ(), asDaemon+"=1", "HOROVOD_GPU_OPERATIONS=nccl")
	return cmd
}

// TestGPUProgram checks that hvdd executes hvdd-gpu in its own folder, with its arguments, its environment
// and its descriptors, if the settings ask for operations on CUDA devices.
func TestGPUProgram(t *testing.T) {
	for _, operations := range []string{"nccl", "host"} {
		gpuProgramFor(t, operations)
	}
}

func gpuProgramFor(t *testing.T, operations string) {
	cmd := install(t, "hvdd", "--fd", "3", "--health", "0")
	cmd.Env = append(cmd.Env, "HOROVOD_GPU_OPERATIONS="+operations)
	script := "#!/bin/sh\necho \"$0 $* $HOROVOD_GPU_OPERATIONS $$\" >&3\n"
	gpu := filepath.Join(filepath.Dir(cmd.Path), "hvdd-gpu")
	if err := os.WriteFile(gpu, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	cmd.ExtraFiles, cmd.Stderr = []*os.File{write}, os.Stderr
	if err := cmd.Run(); err != nil {
		t.Error(err)
	}
	write.Close()
	got, err := io.ReadAll(read)
	if err != nil {
		t.Fatal(err)
	}
	if want := gpu + " --fd 3 --health 0 " + operations + " "; !strings.HasPrefix(string(got), want) {
		t.Errorf("hvdd-gpu said %q, want %q and the number of the process", got, want)
	}

	if err := os.WriteFile(gpu, []byte("no program"), 0o755); err != nil {
		t.Fatal(err)
	}
	again := exec.CommandContext(t.Context(), cmd.Path, "--fd", "3")
	again.Env = cmd.Env
	if out, err := again.CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "cannot execute "+gpu+": exec format error") {
		t.Errorf("got %v and %q from an hvdd whose hvdd-gpu is no program", err, out)
	}
}

// TestGPUProgramWithoutNCCL checks that an hvdd-gpu that was built without NCCL does not execute itself for
// ever.
func TestGPUProgramWithoutNCCL(t *testing.T) {
	out, err := install(t, "hvdd-gpu", "--fd", "3").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "hvdd-gpu was built without the tag nccl or without cgo") {
		t.Errorf("got %v and %q", err, out)
	}
}

// TestGPUProgramIsALink checks that an hvdd-gpu that is a link to hvdd does not make hvdd execute itself for
// ever.
func TestGPUProgramIsALink(t *testing.T) {
	cmd := install(t, "hvdd", "--fd", "3")
	if err := os.Symlink("hvdd", filepath.Join(filepath.Dir(cmd.Path), "hvdd-gpu")); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "hvdd-gpu was built without the tag nccl or without cgo") {
		t.Errorf("got %v and %q", err, out)
	}
}

// TestNoDevices checks that Init fails if the settings ask for operations on CUDA devices.
func TestNoDevices(t *testing.T) {
	t.Setenv("HOROVOD_GPU_OPERATIONS", "nccl")
	p, c := pair(t)
	c.Hello()
	r := c.Call(sidecartest.Init(map[string]string{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}))
	if want := "unset HVD_SIDECAR, or unset HOROVOD_GPU_OPERATIONS"; !strings.Contains(r.Error.GetText(), want) {
		t.Errorf("got %v, want an error with %q", r.Error, want)
	}
	c.Bye()
	p.wants(0, "")
}

// TestCheckGPUs checks that --check-gpus says that there is no NCCL. If there is an hvdd-gpu, it must print
// the answer of that program, also if the settings do not ask for NCCL.
func TestCheckGPUs(t *testing.T) {
	cmd := install(t, "hvdd", "--check-gpus")
	cmd.Env = append(cmd.Env, "HOROVOD_GPU_OPERATIONS=")
	again := *cmd
	var found cuda.Found
	if out, err := cmd.Output(); err != nil || json.Unmarshal(out, &found) != nil || found != (cuda.Found{}) {
		t.Errorf("got %s and %v, want that this hvdd was built without NCCL", out, err)
	}
	gpu := filepath.Join(filepath.Dir(cmd.Path), "hvdd-gpu")
	if err := os.WriteFile(gpu, []byte("#!/bin/sh\necho answer to $*\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := again.Output(); err != nil || string(out) != "answer to --check-gpus\n" {
		t.Errorf("got %q and %v, want the answer of hvdd-gpu", out, err)
	}
}
