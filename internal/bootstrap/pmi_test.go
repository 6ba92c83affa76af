package bootstrap

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
)

// fakePMI acts as a PMI-1 launcher and returns fd, the rank's end of the connection. The launcher looks up
// the cmd of each request in answers and sends the entry as its answer. If there is no entry, it closes the
// connection. If the entry is empty, it does not answer, but calls the functions in silent. The function
// asked returns the requests that the launcher has received. It may be called only after fd was closed.
func fakePMI(t *testing.T, answers map[string]string, silent ...func()) (fd int, asked func() []string) {
	t.Helper()
	fds := testnet.SocketPair(t)
	f := os.NewFile(uintptr(fds[1]), "launcher")
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	var requests []string
	var wg sync.WaitGroup
	wg.Go(func() {
		defer conn.Close()
		for in := bufio.NewScanner(conn); in.Scan(); {
			requests = append(requests, in.Text())
			name, _, _ := strings.Cut(strings.TrimPrefix(in.Text(), "cmd="), " ")
			answer, ok := answers[name]
			if !ok {
				return
			}
			if answer == "" {
				for _, f := range silent {
					f()
				}
			}
			if _, err := conn.Write([]byte(answer)); err != nil {
				return
			}
		}
	})
	t.Cleanup(func() { unix.Close(fds[0]) })
	return fds[0], func() []string {
		wg.Wait()
		return requests
	}
}

// goodPMI returns the answers of a launcher that works. value is the announcement of rank 0.
func goodPMI(value string) map[string]string {
	return map[string]string{
		"init":           "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n",
		"get_maxes":      "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024\n",
		"get_my_kvsname": "cmd=my_kvsname kvsname=kvs_1\n",
		"put":            "cmd=put_result rc=0 msg=success\n",
		"barrier_in":     "cmd=barrier_out\n",
		"get":            "cmd=get_result rc=0 msg=success value=" + value + "\n",
		"finalize":       "cmd=finalize_ack\n",
	}
}

func pmiRank(t *testing.T, rank, fd int) *Env {
	t.Helper()
	return detect(t, pmiEnv.with("PMI_RANK", fmt.Sprint(rank), "PMI_FD", fmt.Sprint(fd), "PMI_SIZE", "2",
		"MPI_LOCALRANKID", fmt.Sprint(rank)))
}

func TestPMIConversation(t *testing.T) {
	fd, asked := fakePMI(t, goodPMI(""))
	m, err := pmiRank(t, 0, fd).Meet(testnet.Context(t), MeetOptions{Secret: parse(t, userSecret)})
	if err != nil {
		t.Fatal(err)
	}
	if m.JobID != "kvs_1" {
		t.Errorf("the job is %q", m.JobID)
	}
	got := strings.Join(asked(), "\n")
	want := "cmd=init pmi_version=1 pmi_subversion=1\ncmd=get_maxes\ncmd=get_my_kvsname\n" +
		"cmd=put kvsname=kvs_1 key=gohvd-meet value=127.0.0.1:"
	if !strings.HasPrefix(got, want) || !strings.HasSuffix(got, ",given\ncmd=barrier_in\ncmd=finalize") {
		t.Errorf("asked\n%s\nwant\n%s...", got, want)
	}

	// Rank 1 must get the announcement of rank 0 from the launcher and connect to the store of rank 0.
	_, value, _ := strings.Cut(got, "value=")
	value, _, _ = strings.Cut(value, "\n")
	fd, asked = fakePMI(t, goodPMI(value))
	other, err := pmiRank(t, 1, fd).Meet(testnet.Context(t), MeetOptions{Secret: parse(t, userSecret)})
	if err != nil {
		t.Fatal(err)
	}
	if last := asked(); last[len(last)-2] != "cmd=get kvsname=kvs_1 key=gohvd-meet" {
		t.Errorf("asked %q", last)
	}
	// A second Meet with the same descriptor must fail, because the first one has shut the socket down.
	_, err = pmiRank(t, 1, fd).Meet(testnet.Context(t), MeetOptions{})
	testnet.WantError(t, err, "pmi: init")
	if err := errors.Join(other.Close(), m.Close()); err != nil {
		t.Error(err)
	}
}

// TestPMIOnHosts checks the address that rank 0 announces if the ranks are on several hosts. It must be the
// name of its host, unless the user sets a host or an interface. If the announced name resolves to the chosen
// interface, rank 0 must listen only on this interface. Otherwise it must listen on all interfaces.
func TestPMIOnHosts(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		o       MeetOptions
		want    string
		onOther bool // rank 0 must also listen on other loopback addresses
	}{
		{MeetOptions{}, name, true},
		{MeetOptions{Host: "192.0.2.1"}, "192.0.2.1", true},
		{MeetOptions{Host: "192.0.2.1", Interfaces: onLoopback(t)}, "192.0.2.1", true},
		{MeetOptions{Interfaces: onLoopback(t)}, loopback, false},
		{MeetOptions{Host: "first", Interfaces: onLoopback(t), resolver: loopbackNames("first")}, "first",
			false},
	} {
		fd, asked := fakePMI(t, goodPMI(""))
		e := detect(t, pmiEnv.with("PMI_RANK", "0", "PMI_FD", fmt.Sprint(fd)))
		c.o.Port = testnet.FreePort(t)
		m, err := e.Meet(testnet.Context(t), c.o)
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("value=%s:%d,", c.want, c.o.Port)
		if got := strings.Join(asked(), "\n"); !strings.Contains(got, want) || m.Secret.IsZero() {
			t.Errorf("asked %s, want %s; %v", got, want, m.Secret)
		}
		if !listens(t, loopback, c.o.Port) || listens(t, "127.0.0.2", c.o.Port) != c.onOther {
			t.Errorf("%s: want that rank 0 listens on %s, and on 127.0.0.2: %v", want, loopback, c.onOther)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestPMIRefuses(t *testing.T) {
	for _, c := range []struct {
		cmd, answer string
		rank        int
		parts       []string
	}{
		{"init", "cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0\n", 1,
			[]string{`version "2" of PMI, want 1`}},
		{"init", "cmd=response_to_init rc=-1 msg=no\n", 1, []string{"pmi: init", `rc="-1" msg="no"`}},
		{"init", "HTTP/1.1 400 Bad Request\n", 1, []string{`cmd="", want response_to_init`}},
		{"init", strings.Repeat("x", maxPMILine+1), 1, []string{"more than 8192 bytes"}},
		{"get_maxes", "cmd=maxes keylen_max=64\n", 1, []string{"get_maxes: vallen_max"}},
		{"get_maxes", "cmd=maxes keylen_max=-1 vallen_max=5\n", 1, []string{"get_maxes: keylen_max"}},
		{"get_maxes", "cmd=maxes keylen_max=64 vallen_max=20\n", 0,
			[]string{"pmi: put", "less than 64 and less than 20"}},
		{"get_maxes", "cmd=maxes keylen_max=10 vallen_max=1024\n", 0,
			[]string{"pmi: put", "less than 10 and less than 1024"}},
		{"get_my_kvsname", "cmd=my_kvsname kvsname=\n", 1, []string{"gave no name"}},
		{"put", "cmd=put_result rc=-1 msg=duplicate_key\n", 0, []string{"pmi: put", "duplicate_key"}},
		{"barrier_in", "cmd=barrier_out rc=1 msg=died\n", 1, []string{"pmi: barrier_in", "died"}},
		{"get", "cmd=get_result rc=-1 msg=key_gohvd-meet_not_found value=unknown\n", 1,
			[]string{"pmi: get", "not_found"}},
		{"get", "cmd=get_result rc=0\n", 1, []string{"no value for gohvd-meet"}},
		{"get", "cmd=get_result rc=0 value=secretsecretsecret\n", 1,
			[]string{"announcement from rank 0: got 18 bytes"}},
		{"get", "cmd=get_result rc=0 value=:1,secretsecretsecret\n", 1,
			[]string{"announcement from rank 0: got no address"}},
		{"get", "cmd=get_result rc=0 value=h:0,secretsecretsecret\n", 1,
			[]string{"announcement from rank 0: got no port"}},
		{"get", "cmd=get_result rc=0 value=h:1,secret\n", 1, []string{"the secret has 6 bytes"}},
		{"finalize", "cmd=finalize_nack\n", 0, []string{"pmi: finalize"}},
	} {
		answers := goodPMI("")
		answers[c.cmd] = c.answer
		fd, asked := fakePMI(t, answers)
		_, err := pmiRank(t, c.rank, fd).Meet(testnet.Context(t), MeetOptions{})
		testnet.WantError(t, err, c.parts...)
		if strings.Contains(fmt.Sprint(err), "secretsecret") {
			t.Errorf("the error shows the secret: %v", err)
		}
		asked()
	}
	// If the launcher closes the connection during the barrier, Meet must return an error.
	answers := goodPMI("")
	delete(answers, "barrier_in")
	fd, _ := fakePMI(t, answers)
	_, err := pmiRank(t, 1, fd).Meet(testnet.Context(t), MeetOptions{})
	testnet.WantError(t, err, "pmi: barrier_in: EOF")
}

// TestPMISilence uses a launcher that does not answer a request. Meet must return when ctx ends.
func TestPMISilence(t *testing.T) {
	for _, cmd := range []string{"init", "barrier_in", "finalize"} {
		answers := goodPMI("")
		answers[cmd] = ""
		ctx, cancel := context.WithCancel(testnet.Context(t))
		fd, _ := fakePMI(t, answers, cancel)
		_, err := pmiRank(t, 0, fd).Meet(ctx, MeetOptions{})
		testnet.WantError(t, err, "pmi: "+cmd)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v", cmd, err)
		}
	}
}

func TestPMINoSocket(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, err = pmiRank(t, 1, int(f.Fd())).Meet(testnet.Context(t), MeetOptions{})
	testnet.WantError(t, err, "PMI_FD is", "want a socket")
	_, err = pmiRank(t, 1, 99999).Meet(testnet.Context(t), MeetOptions{})
	testnet.WantError(t, err, "PMI_FD is 99999", "bad file descriptor")
	_, err = detect(t, pmiEnv.with("PMI_FD", "")).Meet(testnet.Context(t), MeetOptions{})
	testnet.WantError(t, err, "PMI_FD is not set")
}

func FuzzParsePMI(f *testing.F) {
	f.Add("cmd=response_to_init pmi_version=1 rc=0")
	f.Add("= a= =b a==b  c")
	f.Fuzz(func(t *testing.T, line string) {
		for name, value := range parsePMI(line) {
			if word := strings.TrimSuffix(name+"="+value, "="); !strings.Contains(line, word) {
				t.Errorf("%q has no %q", line, word)
			}
		}
	})
}
