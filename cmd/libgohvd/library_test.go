//go:build cgo

package main_test

import (
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// These flags test a library that was built before, such as that of a wheel, also one for another machine.
var (
	built  = flag.String("library", "", "test this `file`, which must work with glibc 2.17, and build none")
	cc     = flag.String("cc", "gcc", "the `command` that compiles programs in C")
	runner = flag.String("exec", "", "the `command` that runs the programs")
)

// folder has the library, unless -library gives one. TestMain removes it.
var folder string

func TestMain(m *testing.M) {
	flag.Parse()
	var err error
	if folder, err = os.MkdirTemp("", "libgohvd"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	status := m.Run()
	if err := os.RemoveAll(folder); err != nil && status == 0 {
		fmt.Fprintln(os.Stderr, err)
		status = 1
	}
	os.Exit(status)
}

// build builds the library once.
var build = sync.OnceValue(func() error {
	out, err := exec.Command("../../scripts/build-libgohvd.sh", path()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
})

// path returns the path of the library that build builds.
func path() string { return filepath.Join(folder, "libgohvd.so") }

// library returns the path of the library, which it builds if necessary.
func library(t *testing.T) string {
	if *built != "" {
		return *built
	}
	if err := build(); err != nil {
		t.Fatal(err)
	}
	return path()
}

// has skips the test if there is no such compiler.
func has(t *testing.T, compiler string) {
	if _, err := exec.LookPath(compiler); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
}

// compile compiles a program that is linked with the library, by a compiler with flags. It returns the path
// of the program.
func compile(t *testing.T, source string, compiler ...string) string {
	lib := filepath.Dir(library(t))
	return compileAlone(t, source, compiler, "-L"+lib, "-Wl,-rpath,"+lib, "-lgohvd", "-lm")
}

// compileAlone compiles a program that is not linked with the library, or another library. The flags in last
// are for the linker.
func compileAlone(t *testing.T, source string, compiler []string, last ...string) string {
	has(t, compiler[0])
	program := filepath.Join(t.TempDir(), "program")
	args := append(compiler[1:], "-Wall", "-Werror", "-g", "-I.", "-o", program, source)
	args = append(args, last...)
	if out, err := exec.Command(compiler[0], append(args, "-ldl")...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// c99 returns the compiler of C programs with its flags. The programs also use functions of POSIX.
func c99() []string { return append(strings.Fields(*cc), "-std=c99", "-D_GNU_SOURCE") }

// run runs a program as a job of n ranks, and returns what they have written.
func run(t *testing.T, n int, program string, args ...string) (outputs []string) {
	t.Helper()
	outputs = make([]string, n)
	method := "file://" + filepath.Join(t.TempDir(), "job")
	var all sync.WaitGroup
	args = slices.Concat(strings.Fields(*runner), []string{program}, args)
	for r := range n {
		c := exec.CommandContext(t.Context(), args[0], args[1:]...)
		c.WaitDelay = time.Second
		c.Env = append(os.Environ(), "HVD_INIT_METHOD="+method, fmt.Sprint("HOROVOD_RANK=", r),
			fmt.Sprint("HOROVOD_SIZE=", n))
		all.Go(func() {
			out, err := c.CombinedOutput()
			outputs[r] = string(out)
			if err != nil {
				t.Errorf("rank %d: %v\n%s", r, err, out)
			}
		})
	}
	all.Wait()
	return outputs
}

func TestCollectives(t *testing.T) {
	program := compile(t, "testdata/collectives.c", c99()...)
	for _, n := range []int{2, 3} {
		t.Run(fmt.Sprint(n, " ranks"), func(t *testing.T) { run(t, n, program) })
	}
	t.Run("TCP", func(t *testing.T) {
		t.Setenv("HOROVOD_CPU_OPERATIONS", "tcp")
		run(t, 2, program)
	})
}

// TestSidecar runs the operations in sidecars that the ranks start and find beside the library.
func TestSidecar(t *testing.T) {
	program := compile(t, "testdata/collectives.c", c99()...)
	if err := testnet.Link(filepath.Dir(library(t)), "cmd/hvdd"); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HVD_SIDECAR", "spawn")
	run(t, 2, program, "sidecar")
	t.Setenv("HVD_SIDECAR_BINARY", filepath.Join(t.TempDir(), "none"))
	out, err := exec.CommandContext(t.Context(), program, "sidecar").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "HVD_SIDECAR_BINARY is") {
		t.Errorf("got error %v and %s, want one that names HVD_SIDECAR_BINARY", err, out)
	}
}

// TestRefused makes wrong calls. The second run uses the address sanitizer, which reports memory that is read
// or written outside of the buffers, or used after it was freed.
func TestRefused(t *testing.T) {
	run(t, 1, compile(t, "testdata/refused.c", c99()...))
	t.Setenv("ASAN_OPTIONS", "detect_leaks=0") // the detector does not know which memory Go points to
	sanitized := append(c99(), "-fsanitize=address,undefined")
	run(t, 1, compile(t, "testdata/refused.c", sanitized...))
	run(t, 2, compile(t, "testdata/collectives.c", sanitized...))
}

// TestProcess checks what the library does to its process when it is loaded, and when a copy is loaded too,
// whatever the names of the files are.
func TestProcess(t *testing.T) {
	program := compile(t, "testdata/process.c", append(c99(), "-Wl,--as-needed")...)
	text := testnet.ReadFile(t, library(t))
	var copies []string
	for _, name := range []string{"engine.so", "other.so"} {
		copies = append(copies, filepath.Join(t.TempDir(), name))
		if err := os.WriteFile(copies[len(copies)-1], text, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	run(t, 1, program, copies...)
}

// TestGlibc checks that the library of a wheel needs no newer symbols than those of glibc 2.17.
func TestGlibc(t *testing.T) {
	if *built == "" {
		t.Skip("needs the library of a wheel: make wheel-check")
	}
	file, err := elf.Open(*built)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	symbols, err := file.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	versions := make(map[string]bool)
	for _, s := range symbols {
		if s.Version == "" {
			continue // a symbol that may be missing
		}
		versions[s.Version] = true
		var major, minor int
		_, err := fmt.Sscanf(s.Version, "GLIBC_%d.%d", &major, &minor)
		if err != nil || major > 2 || minor > 17 {
			t.Errorf("%s needs version %q, want at most GLIBC_2.17", s.Name, s.Version)
		}
	}
	if len(versions) == 0 {
		t.Errorf("got no version of %d symbols, want those of glibc", len(symbols))
	}
	t.Log(slices.Sorted(maps.Keys(versions)))
}

// TestStaticTLS loads the library after 20 others that also need memory at a fixed distance from the thread
// pointer, of which glibc has little for libraries that dlopen loads: 1.6 KiB. Go's runtime needs it in any
// case.
func TestStaticTLS(t *testing.T) {
	file, err := elf.Open(library(t))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	const most = 64
	for _, p := range file.Progs {
		if p.Type == elf.PT_TLS && p.Memsz > most {
			t.Errorf("the library needs %d bytes, want at most %d", p.Memsz, most)
		}
	}
	program := compileAlone(t, "testdata/tls.c", c99())
	other := compileAlone(t, "testdata/tls.c", append(c99(), "-shared", "-fPIC", "-DLIBRARY"))
	text := testnet.ReadFile(t, other)
	var libraries []string
	for i := range 20 {
		libraries = append(libraries, fmt.Sprintf("%s%d.so", other, i))
		if err := os.WriteFile(libraries[i], text, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	run(t, 1, program, append(libraries, library(t))...)
}

// TestBesideGo uses the library together with another shared library of Go, which is loaded before or after
// it.
func TestBesideGo(t *testing.T) {
	program := compileAlone(t, "testdata/beside.c", append(c99(), "-pthread"))
	other := filepath.Join(t.TempDir(), "libother.so")
	build := exec.Command("go", "build", "-buildmode=c-shared", "-trimpath", "-o", other, "./testdata/other")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, order := range [][]string{{library(t), other}, {other, library(t)}} {
		run(t, 1, program, append(order, "end")...)
		out, err := exec.CommandContext(t.Context(), program, append(order, "crash")...).CombinedOutput()
		exit, is := errors.AsType[*exec.ExitError](err)
		if !is || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGSEGV || string(out) != "done\n" {
			t.Errorf("a crash after the libraries %v: %v, want SIGSEGV\n%s", order, err, out)
		}
	}
}

// TestHeader compares the header with the symbols of the library, and compiles it as C and as C++.
func TestHeader(t *testing.T) {
	text := testnet.ReadFile(t, "gohvd.h")
	var declared []string
	for _, m := range regexp.MustCompile(`(?m)^[a-z].*?\b\*?(hvd_\w+)\(`).FindAllStringSubmatch(string(text), -1) {
		if m[1] != "hvd_op" { // it is a static function
			declared = append(declared, m[1])
		}
	}
	slices.Sort(declared)
	file, err := elf.Open(library(t))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	symbols, err := file.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var exported []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF {
			exported = append(exported, s.Name)
		}
	}
	slices.Sort(exported)
	if !slices.Equal(declared, exported) {
		t.Errorf("gohvd.h declares\n%v\nand the library exports\n%v", declared, exported)
	}
	golden := filepath.Join("testdata", "symbols.txt")
	want := testnet.ReadFile(t, golden)
	if got := strings.Join(exported, "\n") + "\n"; got != string(want) {
		t.Errorf("%s has other symbols: if one is missing now, increase HVD_ABI_VERSION; got\n%s", golden, got)
	}
	for _, compiler := range [][]string{
		{"gcc", "-std=c99", "-pedantic", "-x", "c"}, {"g++", "-std=c++11", "-pedantic", "-x", "c++"},
	} {
		t.Run(compiler[0], func(t *testing.T) {
			has(t, compiler[0])
			args := append(compiler[1:], "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "gohvd.h")
			if out, err := exec.Command(compiler[0], args...).CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestExample compiles the program of docs/c-api.md.
func TestExample(t *testing.T) {
	page := testnet.ReadFile(t, "../../docs/c-api.md")
	_, code, _ := strings.Cut(string(page), "```c\n")
	code, _, found := strings.Cut(code, "```")
	if !found {
		t.Fatal("docs/c-api.md has no program")
	}
	source := filepath.Join(t.TempDir(), "example.c")
	testnet.WriteFile(t, source, code)
	run(t, 2, compile(t, source, c99()...))
}

// TestDigits trains as examples/digits does, which is in Go, and compares the weights.
func TestDigits(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "run", "-ldflags=-s -w", "../../examples/digits").Output()
	if err != nil {
		t.Fatal(err)
	}
	hash := regexp.MustCompile(`weights_sha256=(\w+)`)
	for _, compiler := range [][]string{
		{"gcc", "-std=c99", "-D_GNU_SOURCE", "-O2"}, {"g++", "-O2", "-ffp-contract=off", "-x", "c++"},
	} {
		t.Run(compiler[0], func(t *testing.T) {
			program := compile(t, "../../examples/digits.c", compiler...)
			for n, want := range map[int][]string{1: hash.FindStringSubmatch(string(out)), 2: nil} {
				for r, got := range run(t, n, program, "../../examples/optdigits/optdigits.csv.gz") {
					found := hash.FindStringSubmatch(got)
					if want == nil {
						want = found
					}
					if len(found) != 2 || !slices.Equal(found, want) {
						t.Errorf("rank %d of %d: %s, want %v", r, n, got, want)
					}
				}
			}
		})
	}
}
