package binding

import (
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// The main goroutine keeps the main thread, whose CPUs count as those of the process. A test that bound it
// would change them for the tests after it.
func init() { runtime.LockOSThread() }

// allowedBy returns the CPUs that a thread may use, or the calling thread if tid is 0.
func allowedBy(t *testing.T, tid int) CPUs {
	t.Helper()
	set, err := setOf(tid)
	if err != nil {
		t.Fatal(err)
	}
	var c CPUs
	for cpu := range 1024 {
		if set.IsSet(cpu) {
			c = append(c, cpu)
		}
	}
	return c
}

// TestProcess binds this process while other threads exist, one of which the program has bound itself.
func TestProcess(t *testing.T) {
	all, err := Allowed()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 2 {
		t.Skip("this process may use only one CPU, so it cannot be bound to fewer")
	}
	type thread struct {
		tid int
		end chan struct{}
	}
	start := func(own CPUs) thread {
		started := make(chan thread)
		go func() {
			runtime.LockOSThread() // and never unlock it, so that the thread ends with the goroutine
			if own != nil {
				set := own.set()
				if err := unix.SchedSetaffinity(0, &set); err != nil {
					t.Error(err)
				}
			}
			th := thread{unix.Gettid(), make(chan struct{})}
			started <- th
			<-th.end
		}()
		return <-started
	}
	free, bound := start(nil), start(all[1:2])
	defer close(free.end)
	defer close(bound.end)

	first := all[:1]
	undo, err := Process(first)
	if err != nil {
		t.Fatal(err)
	}
	later := start(nil)
	defer close(later.end)
	for _, c := range []struct {
		name string
		tid  int
		want CPUs
	}{{"a thread", free.tid, first}, {"a bound thread", bound.tid, all[1:2]}, {"a new thread", later.tid, first}} {
		if got := allowedBy(t, c.tid); !slices.Equal(got, c.want) {
			t.Errorf("%s may use %s, want %s", c.name, got, c.want)
		}
	}
	if got, err := Allowed(); err != nil || !slices.Equal(got, first) {
		t.Errorf("the process may use %s (error %v), want %s", got, err, first)
	}
	if err := undo(); err != nil {
		t.Fatal(err)
	}
	for _, tid := range []int{free.tid, later.tid} {
		if got := allowedBy(t, tid); !slices.Equal(got, all) {
			t.Errorf("afterwards a thread may use %s, want %s", got, all)
		}
	}
	if got := allowedBy(t, bound.tid); !slices.Equal(got, all[1:2]) {
		t.Errorf("afterwards the bound thread may use %s, want %s", got, all[1:2])
	}
}

func TestStart(t *testing.T) {
	all, err := Allowed()
	if err != nil {
		t.Fatal(err)
	}
	last := all[len(all)-1:]
	if err := Start(last, func() error {
		if got := allowedBy(t, 0); !slices.Equal(got, last) {
			t.Errorf("the thread may use %s, want %s", got, last)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if got := allowedBy(t, 0); !slices.Equal(got, all) {
		t.Errorf("afterwards the thread may use %s, want %s", got, all)
	}
	if err := Start(CPUs{900}, func() error { t.Error("start was called"); return nil }); err == nil {
		t.Error("got no error for a CPU that does not exist")
	}
}
