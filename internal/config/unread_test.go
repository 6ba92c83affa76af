package config_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/config"
)

// exempt are settings that hvdrun or any program may set for processes of all kinds. WarnUnread says nothing
// about them, nor about those that a launcher sets for each process.
var exempt = []string{"HVD_SIZE", "PORT", "HVD_RUN", "HVD_LIBRARY", "HOROVOD_SPARK_START_TIMEOUT", "HVD_SIDECAR",
	"HVD_SIDECAR_BINARY"}

// asked returns the settings that a user may give, with values that ask for something.
func asked(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{config.FileVariable: write(t, "")}
	for _, s := range config.Settings() {
		if s.Scope == config.ByLauncher || slices.Contains(exempt, s.Name) || s.Name == config.FileVariable {
			continue
		}
		all[s.Name] = every[s.Name]
		if slices.Contains([]string{"0", "no"}, every[s.Name]) {
			all[s.Name] = "1"
		}
	}
	all["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "90" // less than the time of the warning has no effect
	all["HOROVOD_CPU_OPERATIONS"] = "tcp"             // nodes do not use each value
	return all
}

// unread returns the warnings of a process with one setting. change sets what a build with MPI would set.
func unread(t *testing.T, r config.Reader, src config.Sources, name, value string,
	change func(*config.Config)) []string {
	t.Helper()
	src.API = map[string]string{name: value}
	c, err := config.Load(src)
	if err != nil {
		t.Fatal(err)
	}
	change(&c)
	c.WarnUnread(r)
	return c.Warnings
}

// TestUnread asks for every setting in every kind of job whether the job reads it. A setting that it does not
// read causes one warning with its name and the reason.
func TestUnread(t *testing.T) {
	node := []string{"DMLC_ROLE=worker"}
	none := func(*config.Config) {}
	operations := func(word string) []string { return []string{"HOROVOD_CPU_OPERATIONS=" + word} }
	mpi := func(c *config.Config) {
		c.MPIController, c.MPIOperations, c.SharedMemory = true, true, config.SharedNever
	}
	devices := []string{"HVD_NCCL_LIBRARY", "HVD_CUDART_LIBRARY"}
	autotune := []string{"HOROVOD_AUTOTUNE_LOG", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
		"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
		"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"}
	twoLevels := []string{"HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER"}
	algorithms := []string{"HVD_ALGORITHM"}
	meeting := []string{"HVD_RENDEZVOUS_HOST", "HVD_RENDEZVOUS_PORT"}
	var servers []string
	for _, s := range config.Settings() {
		if s.Section == "Parameter server" && s.Scope != config.ByLauncher && s.Name != "PORT" {
			servers = append(servers, s.Name)
		}
	}
	const threads, subdomain = "HOROVOD_MPI_THREADS_DISABLE", "HVD_SUBDOMAIN"
	streams := []string{"HOROVOD_NUM_NCCL_STREAMS", "HOROVOD_ENABLE_ASYNC_COMPLETION"}
	common := slices.Concat(autotune, servers, []string{threads, subdomain})
	for _, c := range []struct {
		name   string
		reader config.Reader
		src    config.Sources
		change func(*config.Config)
		want   []string
	}{
		{"rank", config.Rank, config.Sources{}, none, common},
		{"rank over shm", config.Rank, config.Sources{Environ: operations("shm")}, none,
			slices.Concat(common, twoLevels, algorithms)},
		{"rank over tcp", config.Rank, config.Sources{Environ: operations("tcp")}, none,
			slices.Concat(common, twoLevels)},
		{"rank over MPI", config.Rank, config.Sources{}, mpi,
			slices.Concat(autotune, servers, twoLevels, algorithms, []string{subdomain})},
		{"rank over NCCL", config.Rank, config.Sources{Environ: []string{"HOROVOD_GPU_OPERATIONS=nccl"}}, none,
			slices.Concat(common, twoLevels)},
		{"rank with copies from devices", config.Rank, config.Sources{Environ: []string{"HOROVOD_GPU_OPERATIONS=host"}},
			none, slices.Concat(common, streams, devices[:1])},
		{"rank without devices", config.Rank, config.Sources{Environ: []string{"HOROVOD_GPU_OPERATIONS=none"}}, none,
			slices.Concat(common, streams, devices)},
		{"rank with autotuning", config.Rank, config.Sources{Environ: []string{"HOROVOD_AUTOTUNE=1"}}, none,
			slices.Concat(servers, []string{threads, subdomain})},
		{"pod", config.Rank, config.Sources{Environ: []string{"JOB_COMPLETION_INDEX=1"}}, none,
			slices.Concat(autotune, servers, []string{threads})},
		{"node that is also a rank", config.Rank, config.Sources{Environ: node}, none,
			slices.Concat(autotune, []string{threads, subdomain})},
		{"torch backend", config.Rank, config.Sources{HaveStore: true}, none, slices.Concat(common, meeting,
			[]string{"HVD_INIT_METHOD", "HVD_UNIQUE_ID"})},
		{"hvdrun", config.Rank, config.Sources{Launcher: true}, none, slices.Concat(common, meeting)},
		{"hvdrun --servers", config.Node, config.Sources{Launcher: true}, none, unreadByNodes(t)},
		{"node", config.Node, config.Sources{Environ: node, HaveStore: true}, none, unreadByNodes(t)},
	} {
		var got []string
		for name, value := range asked(t) {
			warnings := unread(t, c.reader, c.src, name, value, c.change)
			switch {
			case len(warnings) > 1, len(warnings) == 1 && !strings.HasPrefix(warnings[0], name+" has no effect"):
				t.Errorf("%s: %s=%s causes the warnings %q", c.name, name, value, warnings)
			case len(warnings) == 1:
				got = append(got, name)
			}
		}
		slices.Sort(got)
		slices.Sort(c.want)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: got warnings about\n%s\nwant\n%s", c.name, strings.Join(got, "\n"), strings.Join(c.want, "\n"))
		}
		t.Logf("%s: no effect have %s", c.name, strings.Join(got, " "))
	}
	for word, want := range map[string]int{"shm": 1, "shm,tcp": 0, "tcp": 0, "gloo": 0} {
		got := unread(t, config.Node, config.Sources{Environ: node}, "HOROVOD_CPU_OPERATIONS", word, none)
		if len(got) != want {
			t.Errorf("HOROVOD_CPU_OPERATIONS=%s at a node causes the warnings %q", word, got)
		}
	}
	if got := unread(t, config.Node, config.Sources{Environ: node}, "HOROVOD_CPU_OPERATIONS", "tcp", mpi); len(got) > 0 {
		t.Errorf("HOROVOD_CPU_OPERATIONS=mpi, which is tcp for a node, causes the warnings %q", got)
	}
}

// TestUnreadOnce checks that there is no warning for a switch that is off or for a default value, and no
// second warning.
func TestUnreadOnce(t *testing.T) {
	c, err := config.Load(config.Sources{Launcher: true, Environ: []string{"HOROVOD_AUTOTUNE=0",
		"HOROVOD_AUTOTUNE_LOG=x", "HOROVOD_CYCLE_TIME=3", "HOROVOD_CACHE_CAPACITY=1024"}})
	if err != nil {
		t.Fatal(err)
	}
	c.WarnUnread(config.Node)
	c.WarnUnread(config.Node)
	if len(c.Warnings) != 2 {
		t.Errorf("got %q, want two warnings", c.Warnings)
	}
	// The nodes do not repeat what hvdrun has printed.
	n, err := config.Load(config.Sources{Environ: append(c.ForRanks(), "HOROVOD_CYCLE_TIME=3")})
	if err != nil {
		t.Fatal(err)
	}
	if n.WarnUnread(config.Node); len(n.Warnings) != 0 {
		t.Errorf("a node repeats %q", n.Warnings)
	}
}

// unreadByNodes returns the settings whose values the source code of nodes does not read.
func unreadByNodes(t *testing.T) (names []string) {
	t.Helper()
	return unreadBy(t, func(path string) bool {
		return strings.HasPrefix(path, "ps/") || strings.HasPrefix(path, "internal/ps/")
	}, "HostID", "JobSecret", "Logger")
}

// TestRanksRead checks that the source code of ranks reads every setting, except those of nodes.
func TestRanksRead(t *testing.T) {
	for _, name := range unreadBy(t, func(path string) bool {
		return !strings.HasPrefix(path, "ps/") && !strings.HasPrefix(path, "internal/ps/") &&
			!strings.HasPrefix(path, "internal/config/") && !strings.HasPrefix(path, "cmd/")
	}, "JobSecret", "Logger") {
		if s, _ := config.Lookup(name); s.Section != "Parameter server" {
			t.Errorf("no rank reads %s", name)
		}
	}
}

// unreadBy returns the settings that the source files for which of is true do not read, neither directly nor
// by one of the given functions, which take a Config.
func unreadBy(t *testing.T, of func(path string) bool, functions ...string) (names []string) {
	t.Helper()
	read := make(map[string]bool) // names of fields, methods and variables
	bodies := make(map[string]map[string]bool)
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		rel := filepath.ToSlash(strings.TrimPrefix(path, "../../"))
		library := strings.HasPrefix(rel, "internal/config/") || strings.HasPrefix(rel, "internal/bootstrap/")
		if !of(rel) && !library {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, text, 0)
		if err != nil {
			return err
		}
		if of(rel) {
			selected(file, read)
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && library && slices.Contains(functions, f.Name.Name) {
				bodies[f.Name.Name] = make(map[string]bool)
				selected(f.Body, bodies[f.Name.Name])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range functions {
		if read[f] {
			for name := range bodies[f] {
				read[name] = true
			}
		}
	}
	plain := config.Defaults()
	for name, value := range asked(t) {
		if name == config.FileVariable || read[name] {
			continue
		}
		c, err := config.Load(config.Sources{API: map[string]string{name: value}})
		if err != nil {
			t.Fatal(err)
		}
		fields := changed(reflect.ValueOf(plain), reflect.ValueOf(c))
		if name == "HOROVOD_CONTROLLER" { // without MPI, all of its values have the same effect
			fields = []string{"MPIController"}
		}
		if value != every[name] { // value is the default
			if c, err = config.Load(config.Sources{API: map[string]string{name: every[name]}}); err != nil {
				t.Fatal(err)
			}
			fields = append(fields, changed(reflect.ValueOf(plain), reflect.ValueOf(c))...)
		}
		if !slices.ContainsFunc(fields, func(f string) bool { return read[f] }) {
			names = append(names, name)
		}
	}
	return names
}

// selected adds to all the names that are selected in a part of a file, and those of variables that it reads.
func selected(n ast.Node, all map[string]bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			all[n.Sel.Name] = true
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.SelectorExpr); ok && (f.Sel.Name == "Variable" || f.Sel.Name == "getenv") {
				for _, a := range n.Args {
					if l, ok := a.(*ast.BasicLit); ok {
						if text, err := strconv.Unquote(l.Value); err == nil {
							all[text] = true
						}
					}
				}
			}
		}
		return true
	})
}

// changed returns the names of the exported fields, also of structs in structs, in which a and b differ.
func changed(a, b reflect.Value) (names []string) {
	for i := range a.NumField() {
		f := a.Type().Field(i)
		switch {
		case !f.IsExported() || f.Name == "Warnings":
		case f.Type.Kind() == reflect.Struct:
			names = append(names, changed(a.Field(i), b.Field(i))...)
		case fmt.Sprint(a.Field(i)) != fmt.Sprint(b.Field(i)):
			names = append(names, f.Name)
		}
	}
	return names
}
