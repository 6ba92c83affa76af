package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// spread is a job on several hosts without a launcher. The test starts its ranks, with the variables that a
// launcher would set. If job.cmd is set, it is the process of the store, which ends after the last rank.
type spread struct {
	*job
	ranks   []*exec.Cmd
	ended   []time.Time // the time at which each rank ended, indexed by rank
	running sync.WaitGroup
}

// locked is a writer that appends to the standard error output of a job while it holds the lock of the job.
type locked struct{ *job }

func (l locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stderr.Write(p)
}

// layout has the number of ranks on each host of a job. The ranks of a host are consecutive.
type layout []int

// evenly returns the layout of the given number of hosts with perHost ranks each.
func evenly(hosts, perHost int) layout { return slices.Repeat(layout{perHost}, hosts) }

func (l layout) String() string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint([]int(l)), "[]"), " ", "+")
}

func (l layout) size() (ranks int) {
	for _, n := range l {
		ranks += n
	}
	return ranks
}

// place returns the host of a rank, and the local rank.
func (l layout) place(rank int) (host, local int) {
	for local = rank; local >= l[host]; host++ {
		local -= l[host]
	}
	return host, local
}

// cross returns the cross rank and the cross size of a rank: the index of its host among the hosts that have
// a rank with the same local rank, and their number.
func (l layout) cross(rank int) (cross, size int) {
	mine, local := l.place(rank)
	for host, n := range l {
		if n > local {
			if size++; host < mine {
				cross++
			}
		}
	}
	return cross, size
}

// line returns the line that a rank of the program "checked" prints about its place.
func (l layout) line(rank int) string {
	host, local := l.place(rank)
	cross, crossSize := l.cross(rank)
	return fmt.Sprintf("[%d]<stdout>:place %d %d %d %d %d %d\n", rank, rank, l.size(), local, l[host], cross,
		crossSize)
}

// startOn runs this binary as the given program on hosts, with the given layout. The store and rank 0 are on
// hosts[0].
func startOn(t *testing.T, hosts []*testnet.Host, l layout, program string, env ...string) *spread {
	t.Helper()
	s, ctx := newSpread(t)
	_, text := secret.New()
	secrets := []string{"HVD_JOB_ID=hosts", "HVD_SECRET=" + text}

	self := testnet.Self(t)
	s.cmd = hosts[0].Command(ctx, self)
	s.cmd.Env = slices.Concat(os.Environ(), secrets, env, []string{
		programVariable + "=store", storeAddrVariable + "=" + net.JoinHostPort(hosts[0].Addr.String(), "0"),
	})
	s.cmd.Stderr = locked{s.job}
	hold, err := s.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said, _ := bufio.NewReader(stdout).ReadString('\n')
	addr, port, err := net.SplitHostPort(strings.TrimSpace(said))
	if err != nil {
		t.Fatalf("the store says %q: %s", said, s.err())
	}
	s.run(ctx, hosts, l, program, func(r, h, local int) []string {
		cross, crossSize := l.cross(r)
		return slices.Concat(secrets, []string{
			"HOROVOD_RANK=" + strconv.Itoa(r),
			"HOROVOD_SIZE=" + strconv.Itoa(l.size()),
			"HOROVOD_LOCAL_RANK=" + strconv.Itoa(local),
			"HOROVOD_LOCAL_SIZE=" + strconv.Itoa(l[h]),
			"HOROVOD_CROSS_RANK=" + strconv.Itoa(cross),
			"HOROVOD_CROSS_SIZE=" + strconv.Itoa(crossSize),
			"HOROVOD_HOSTNAME=" + hosts[h].Name,
			"HOROVOD_GLOO_RENDEZVOUS_ADDR=" + addr,
			"HOROVOD_GLOO_RENDEZVOUS_PORT=" + port,
		}, env)
	}, func() { hold.Close() })
	return s
}

// newSpread returns a job without processes, and the context to start its processes with. The context and the
// processes end when the test ends, but at most after jobLimit.
func newSpread(t *testing.T) (s *spread, ctx context.Context) {
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	s = &spread{job: &job{t: t, lines: make(chan line, 1000)}}
	t.Cleanup(func() {
		cancel()
		s.running.Wait()
	})
	return s, ctx
}

// run starts the ranks of a layout on hosts, with the variables that the function env returns. It returns
// without waiting for the ranks. When the last rank has ended, it calls the function ended.
func (s *spread) run(ctx context.Context, hosts []*testnet.Host, l layout, program string,
	env func(rank, host, local int) []string, ended func()) {
	s.t.Helper()
	self := testnet.Self(s.t)
	s.ended = make([]time.Time, l.size())
	for r := range l.size() {
		h, local := l.place(r)
		cmd := hosts[h].Command(ctx, self)
		cmd.Env = slices.Concat(os.Environ(), []string{programVariable + "=" + program}, env(r, h, local))
		s.ranks = append(s.ranks, cmd)
		s.follow(r, cmd)
	}
	s.wg.Go(func() {
		defer close(s.lines)
		defer ended()
		s.running.Wait()
	})
}

// follow starts the process of rank r and reads its output in a goroutine until the process ends.
func (s *spread) follow(r int, cmd *exec.Cmd) {
	cmd.Stderr = locked{s.job}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.running.Go(func() {
		for in := bufio.NewScanner(stdout); in.Scan(); {
			l := line{rank: r, text: in.Text(), at: time.Now()}
			s.mu.Lock()
			fmt.Fprintf(&s.output, "[%d]<stdout>:%s\n", r, l.text)
			s.mu.Unlock()
			s.lines <- l
		}
		_ = cmd.Wait() // the exit status is available from cmd
		s.ended[r] = time.Now()
	})
}

// end waits until all processes have ended and returns the exit statuses of the ranks. The test fails if the
// store has failed.
func (s *spread) end() (statuses []int) {
	s.t.Helper()
	if status := s.wait(); status != 0 {
		s.t.Errorf("the store ended with status %d", status)
	}
	for _, cmd := range s.ranks {
		statuses = append(statuses, cmd.ProcessState.ExitCode())
	}
	return statuses
}

// tell logs the output of all processes, if the test has failed.
func (s *spread) tell() {
	if s.t.Failed() {
		s.t.Logf("output:\n%s\n%s", s.out(), s.err())
	}
}

// Ranks run on several hosts. Operations give right results, on two levels unless that is turned off, and the
// ranks know their rank, local rank and cross rank.
func TestSeveralHosts(t *testing.T) {
	for _, c := range []struct {
		name      string
		layout    layout
		twoLevels bool // whether operations of all ranks run on two levels
		env       []string
	}{
		{"2+2", layout{2, 2}, true, nil},
		{"lockstep", layout{2, 1}, true, []string{"HVD_NEGOTIATION=lockstep"}},
		{"TLS", layout{2, 2}, true, []string{"HVD_TLS=1"}},
		{"one level", layout{2, 2}, false, []string{"HOROVOD_HIERARCHICAL_ALLREDUCE=0", "HOROVOD_HIERARCHICAL_ALLGATHER=0"}},
		// A user who starts ranks by hand sets none of these variables. In that case the ranks learn their
		// hosts and local ranks from each other.
		{"by hand", layout{1, 2}, true, []string{
			"HOROVOD_HOSTNAME=", "HOROVOD_LOCAL_RANK=", "HOROVOD_LOCAL_SIZE=", "HOROVOD_CROSS_RANK=",
			"HOROVOD_CROSS_SIZE=",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := startOn(t, testnet.NewHosts(t, len(c.layout)), c.layout, "checked",
				append(c.env, secondsVariable+"=0.3")...)
			if got, want := s.end(), make([]int, c.layout.size()); !slices.Equal(got, want) {
				t.Errorf("the ranks ended with statuses %v", got)
			}
			for r := range c.layout.size() {
				for _, want := range []string{c.layout.line(r), fmt.Sprintf("[%d]<stdout>:rounds ", r)} {
					if !strings.Contains(s.out(), want) {
						t.Errorf("rank %d did not say %q", r, want)
					}
				}
			}
			checkTwoLevels(t, s.out(), c.twoLevels, c.layout.size())
			s.tell()
		})
	}
}

// checkTwoLevels checks in the output of the program "checked" whether each rank has run operations on two
// levels: some of each kind that is supported there, or none. Other sets than that of all ranks may be on one
// host, or have one rank on each host, so they use other backends.
func checkTwoLevels(t *testing.T, out string, twoLevels bool, ranks int) {
	t.Helper()
	lines := regexp.MustCompile(`(?m)^.*<stdout>:ran (.*)$`).FindAllStringSubmatch(out, -1)
	if len(lines) != ranks {
		t.Errorf("%d of %d ranks said what ran", len(lines), ranks)
	}
	for _, l := range lines {
		for _, kind := range []string{"allreduce", "allgather", "broadcast", "reducescatter"} {
			if got := strings.Contains(l[1], "hier/"+kind); got != twoLevels {
				t.Errorf("%s: %s on two levels is %v, want %v", l[1], kind, got, twoLevels)
			}
		}
	}
}

// Ranks are on different hosts, and HOROVOD_HOSTNAME is the same on both. The ranks do not share memory.
// (Sharing would be possible here, because the hosts are namespaces of one machine.)
func TestHostsShareNoMemory(t *testing.T) {
	hosts := testnet.NewHosts(t, 2)
	s := startOn(t, hosts, layout{1, 1}, "checked", "HOROVOD_CPU_OPERATIONS=shm", "HOROVOD_HOSTNAME=same")
	if got, want := s.end(), []int{1, 1}; !slices.Equal(got, want) {
		t.Errorf("the ranks ended with statuses %v, want %v", got, want)
	}
	if n := strings.Count(s.out(), "the ranks are on several hosts"); n != 2 {
		t.Errorf("%d of 2 ranks say that they are on several hosts", n)
	}
	s.tell()
}

// A link is down for much less than the liveness limit. The job waits and does not fail.
func TestLinkComesBack(t *testing.T) {
	t.Parallel()
	hosts := testnet.NewHosts(t, 2)
	s := startOn(t, hosts, layout{2, 2}, "checked", secondsVariable+"=3")
	s.awaitLines(4, "place ")
	for range 2 {
		hosts[1].SetLink(false)
		<-time.After(time.Second)
		hosts[1].SetLink(true)
	}
	if got, want := s.end(), make([]int, 4); !slices.Equal(got, want) {
		t.Errorf("the ranks ended with statuses %v", got)
	}
	s.tell()
}

// One of two hosts has no link when the job starts. Every rank on both hosts fails when its time limit for
// meeting the other ranks is reached. Its error names the rank or the store that it could not reach.
func TestNoLinkAtStart(t *testing.T) {
	t.Parallel()
	const deadline = 30 * time.Second // if it takes longer, the job hangs; the time limit for meeting is 3 s
	hosts := testnet.NewHosts(t, 2)
	missed := []string{"waiting for rank 1: ", "store: dial " + hosts[0].Addr.String()}
	hosts[1].SetLink(false)
	began := time.Now()
	s := startOn(t, hosts, layout{1, 1}, "checked", "HOROVOD_GLOO_TIMEOUT_SECONDS=3")
	reports := 0
	s.until("all ranks had reported", func(l line) bool {
		if text, ok := strings.CutPrefix(l.text, "error "); ok {
			reports++
			if !strings.Contains(text, missed[l.rank]) {
				t.Errorf("rank %d does not say %q: %s", l.rank, missed[l.rank], text)
			}
			if took := l.at.Sub(began); took > deadline {
				t.Errorf("rank %d took %v, want at most %v", l.rank, took, deadline)
			}
		}
		return reports == 2
	})
	if got, want := s.end(), []int{1, 1}; !slices.Equal(got, want) {
		t.Errorf("the ranks ended with statuses %v, want %v", got, want)
	}
	s.tell()
}

var (
	failedRanks = regexp.MustCompile(`ranks? \d+(?:(?:, | and )\d+)*`)
	number      = regexp.MustCompile(`\d+`)
)

// linkDown is a case of TestLinkDown, in which a host loses its link in the middle of an operation.
type linkDown struct {
	program     string
	layout      layout
	lost        int  // the index of the host that loses its link
	atHost      bool // if set, the host's own interface is set down, which also removes its routes
	negotiation string
	leaders     []string // variables
}

// withLeaders is a setting with which leaders pass on the control frames of their hosts even in small jobs.
const withLeaders = "HVD_LEADERS_ABOVE=1"

// levelsVariable names a variable. If it is set, leaders have leaders too in a job with leaders on more than
// two hosts. No setting has this effect.
const levelsVariable = "GOHVD_E2E_LEVELS"

// A host loses its link in the middle of an operation. On both sides every rank ends with an error that names
// ranks of the other side and no rank of its own side. If rank 0 is not on the lost host, the ranks on rank
// 0's side name all ranks of the lost host or, if it has a leader, the leader. When the link is back, new
// jobs run on the hosts.
func TestLinkDown(t *testing.T) {
	for _, c := range []linkDown{
		{"mixed", evenly(2, 2), 1, false, "event", nil},
		{"mixed", evenly(2, 2), 1, false, "event", []string{withLeaders}},
		{"mixed", evenly(2, 2), 0, false, "lockstep", nil},
		{"large", evenly(2, 2), 0, true, "event", nil},
		{"small", evenly(3, 1), 1, true, "event", nil},
		{"small", evenly(3, 1), 2, false, "lockstep", nil},
		{"waiting", evenly(3, 1), 0, false, "event", nil},
		{"joined", evenly(3, 1), 2, false, "event", nil},
	} {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			c.run(t)
		})
	}
}

func (c *linkDown) String() string {
	return fmt.Sprintf("%s/%s/%v/%d/%s", c.program, c.negotiation, c.layout, c.lost, c.leaders)
}

// run returns the time from the loss of the link until all ranks have reported.
func (c *linkDown) run(t *testing.T) (longest time.Duration) {
	const (
		liveness = 3 * time.Second  // the smallest value that the setting can have
		deadline = 30 * time.Second // to detect a hang; the verdict comes soon after liveness
	)
	hosts := testnet.NewHosts(t, len(c.layout))
	s := startOn(t, hosts, c.layout, c.program, append([]string{"HVD_NEGOTIATION=" + c.negotiation,
		fmt.Sprintf("HVD_LIVENESS_SECONDS=%v", liveness.Seconds())}, c.leaders...)...)
	size := c.layout.size()
	s.ready(size)
	setLink := func(up bool) {
		if !c.atHost {
			hosts[c.lost].SetLink(up)
			return
		}
		state := map[bool]string{true: "up", false: "down"}[up]
		set := hosts[c.lost].Command(t.Context(), "ip", "link", "set", testnet.HostInterface, state)
		if out, err := set.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	setLink(false)
	cut := time.Now()
	isLost := func(r int) bool {
		host, _ := c.layout.place(r)
		return host == c.lost
	}
	reports := 0
	s.until("all ranks had reported", func(l line) bool {
		text, ok := strings.CutPrefix(l.text, "error ")
		if !ok {
			return false
		}
		reports++
		took := l.at.Sub(cut)
		longest = max(longest, took)
		t.Logf("rank %d after %v: %s", l.rank, took.Round(time.Millisecond), text)
		if took > deadline {
			t.Errorf("rank %d took %v, want at most %v", l.rank, took, deadline)
		}
		named := make(map[int]bool)
		for _, list := range failedRanks.FindAllString(text, -1) {
			for _, n := range number.FindAllString(list, -1) {
				r, err := strconv.Atoi(n)
				named[r] = true
				if err != nil || isLost(r) == isLost(l.rank) {
					t.Errorf("rank %d names a rank that it can reach: %s", l.rank, text)
				}
			}
		}
		// Rank 0 notices the loss of each rank. The other ranks notice only the loss of rank 0.
		want := 1
		if !isLost(0) && !isLost(l.rank) && (len(c.leaders) == 0 || c.negotiation == "lockstep") {
			want = c.layout[c.lost]
		}
		if len(named) < want {
			t.Errorf("rank %d names %d ranks, want %d at least: %s", l.rank, len(named), want, text)
		}
		return reports == size
	})
	if got, want := s.end(), slices.Repeat([]int{1}, size); !slices.Equal(got, want) {
		t.Errorf("the ranks ended with statuses %v, want %v", got, want)
	}
	for r, at := range s.ended {
		if took := at.Sub(cut); took > deadline {
			t.Errorf("rank %d ended after %v, want at most %v", r, took, deadline)
		}
	}
	s.tell()

	setLink(true)
	again := startOn(t, hosts, c.layout, "checked", secondsVariable+"=0")
	if got, want := again.end(), make([]int, size); !slices.Equal(got, want) {
		t.Errorf("afterwards the ranks ended with statuses %v", got)
		again.tell()
	}
	return longest
}
