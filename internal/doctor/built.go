package doctor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"

	"github.com/gohvd/gohvd/internal/config"
)

// Part is a component, such as MPI, that some builds of gohvd contain and others do not.
type Part struct {
	// Kind is the heading of the component, such as "Controllers". Name is its name. Built is set if this
	// build contains it.
	Kind, Name string
	Built      bool
}

// Parts returns the components that a build may contain, grouped by kind. libgohvd says whether it has NCCL
// and can load it.
func (s *System) Parts(ctx context.Context) []Part {
	const own = "Gloo (gohvd's own, over shared memory and TCP)"
	found, err := s.gpus(ctx)
	torch := Part{"Frameworks", "PyTorch (over libgohvd)", true}
	if no, is := errors.AsType[libraryError](err); is {
		torch = Part{"Frameworks", fmt.Sprintf("PyTorch (%v)", no), false}
	}
	nccl := Part{"Tensor Operations", fmt.Sprintf("NCCL (version %s, over libgohvd)", found.NCCL.Version), true}
	if err != nil {
		nccl = Part{"Tensor Operations", fmt.Sprintf("NCCL (%v)", err), false}
	}
	return []Part{
		{"Frameworks", "Go", true}, torch, {"Frameworks", "TensorFlow", false},
		{"Frameworks", "MXNet", false},
		{"Controllers", "MPI", config.BuiltMPI}, {"Controllers", own, true},
		nccl, {"Tensor Operations", "DDL", false}, {"Tensor Operations", "CCL", false},
		{"Tensor Operations", "MPI", config.BuiltMPI}, {"Tensor Operations", own, true},
	}
}

// WriteBuild writes the parts in the format of horovodrun --check-build, for scripts that search the output
// for texts such as "[X] PyTorch".
func (s *System) WriteBuild(ctx context.Context, w io.Writer) error {
	out := bufio.NewWriter(w)
	fmt.Fprintf(out, "gohvd %s:\n", config.VersionText())
	kind := ""
	for _, p := range s.Parts(ctx) {
		if p.Kind != kind {
			kind = p.Kind
			fmt.Fprintf(out, "\nAvailable %s:\n", kind)
		}
		mark := " "
		if p.Built {
			mark = "X"
		}
		fmt.Fprintf(out, "    [%s] %s\n", mark, p.Name)
	}
	return out.Flush()
}

// built reports the version, the compiler and the components of this program. Every line is ok, because a
// missing component is not a problem.
func built(ctx context.Context, s *System) []Line {
	b := s.Build
	lines := []Line{ok("version", "gohvd %s", config.VersionText())}
	compiler := b.Go + " for " + s.Arch
	if b.Known {
		compiler += fmt.Sprintf(", cgo %s, assembly %s", onOff(b.CGO), onOff(!b.NoAsm))
	}
	lines = append(lines, ok("compiler", "%s", compiler))
	for parts := s.Parts(ctx); len(parts) > 0; {
		var has, lacks []string
		kind := parts[0].Kind
		for len(parts) > 0 && parts[0].Kind == kind {
			if parts[0].Built {
				has = append(has, parts[0].Name)
			} else {
				lacks = append(lacks, parts[0].Name)
			}
			parts = parts[1:]
		}
		lines = append(lines, ok(strings.ToLower(kind), "%s; not built in: %s", strings.Join(has, ", "),
			strings.Join(lacks, ", ")))
	}
	if cpu, known := config.Lookup("HOROVOD_CPU_OPERATIONS"); known {
		lines = append(lines, ok("cpu operations", "%s can be %s", cpu.Name, cpu.Want()))
	}
	return lines
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// getenv returns the value of a variable in Environ, or "" if the variable is not there. If it is there more
// than once, the last value counts, as in a program.
func (s *System) getenv(name string) (value string) {
	for _, e := range s.Environ {
		if v, is := strings.CutPrefix(e, name+"="); is {
			value = v
		}
	}
	return value
}

// nvidia reports the NVIDIA GPUs that have device files. A container has only the files of the GPUs that it
// may use.
func nvidia(_ context.Context, s *System) []Line {
	devices := s.gpuFiles()
	if len(devices) == 0 {
		return []Line{ok("", "no device files")}
	}
	driver := "no driver in /proc/driver/nvidia"
	if text, err := fs.ReadFile(s.Root, "proc/driver/nvidia/version"); err == nil {
		driver, _, _ = strings.Cut(string(text), "\n")
	}
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = path.Base(d)
	}
	lines := []Line{ok("", "%s; %s", strings.Join(names, " "), driver)}
	if _, err := fs.Stat(s.Root, "dev/nvidiactl"); err != nil {
		lines = append(lines, warn("", "give the container all of the GPU's device files (docker --gpus)",
			"%v", err))
	}
	return lines
}

// gpuFiles returns the device files of NVIDIA GPUs.
func (s *System) gpuFiles() []string {
	files, _ := fs.Glob(s.Root, "dev/nvidia[0-9]*") // Glob fails only for a malformed pattern
	return files
}
