package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
)

// purposes has the purposes that a handshake can name: the store, the root at rank 0, and the endpoint of a
// rank.
var purposes = []string{"GHVS", "GHVB", "ghvd"}

// doorDeadline limits how long a listener may keep an unauthenticated connection open. It is three times the
// limit of 10 s for a handshake.
const doorDeadline = 30 * time.Second

// Peers that do not know the secret of a running job connect to each of its ports, some with a replayed
// handshake. They are refused and learn nothing, and the job logs the attempts. The job goes on, and peers
// that know the secret can still connect.
func TestDoors(t *testing.T) {
	for _, mode := range []struct{ name, tls string }{{"plain", "0"}, {"TLS", "1"}} {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			stop := filepath.Join(t.TempDir(), "stop")
			j := start(t, 2, "steady", stopVariable+"="+stop, "HOROVOD_LOG_LEVEL=info", "HVD_TLS="+mode.tls)
			pids := append(j.ready(2), j.cmd.Process.Pid)
			text := variable(t, pids[0], "HVD_SECRET")
			key, err := secret.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			wrong, _ := secret.New()
			doors := find(t, pids, key, mode.tls == "1")
			// The ports belong to hvdrun's store, rank 0's root and the endpoint of each of the two ranks.
			// PyTorch's store is not among them, because it has no secret.
			if len(doors) != 4 {
				t.Fatalf("%d doors know the secret, want 4: %v", len(doors), doors)
			}
			if os.Geteuid() == 0 { // otherwise there is no other user
				numKeys := []byte{6} // in the protocol of PyTorch before 2.1
				torch := net.JoinHostPort("127.0.0.1", variable(t, pids[0], "MASTER_PORT"))
				if len(testnet.AskAs(t, 0, torch, numKeys)) == 0 {
					t.Error("the TCPStore does not answer its own user")
				}
				if len(testnet.AskAs(t, 65534, torch, numKeys)) != 0 {
					t.Error("the TCPStore answers another user")
				}
			}
			before := peakMiB(t, pids[0])
			for _, d := range doors {
				d.attack(t, d.keyed(key), d.keyed(wrong))
			}
			halfOpen(t, doors, key)
			// The limit leaves room for the memory of about 2,000 connections, even under the race detector.
			if after := peakMiB(t, pids[0]); after > before+256 {
				t.Errorf("rank 0 grew from %d to %d MiB", before, after)
			}
			testnet.WriteFile(t, stop, "")
			if status := j.wait(); status != 0 || strings.Count(j.out(), "]<stdout>:rounds ") != 2 {
				t.Errorf("the job ended with status %d:\n%s", status, j.out())
			}
			testnet.WantText(t, j.err(), "has another secret", "has no secret")
			if strings.Contains(j.err(), text) {
				t.Error("the secret is in a log")
			}
			if t.Failed() {
				log := j.err()
				t.Logf("%s", log[:min(len(log), 20000)])
			}
		})
	}
}

// Another user takes the name of the runtime folder in the folder for temporary files, and locks the folder
// for temporary files. Jobs start all the same.
func TestTakenRuntimeFolder(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can run a program as another user")
	}
	dir, err := os.MkdirTemp("", "open") // other users cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, os.ModeSticky|0o777); err != nil {
		t.Fatal(err)
	}
	attacker := exec.CommandContext(t.Context(), "sh", "-c",
		`mkdir "$1/gohvd-0" && exec flock "$1" sh -c 'echo locked; exec cat'`, "sh", dir)
	attacker.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	attacker.Dir, attacker.Stderr = "/", os.Stderr
	in, err := attacker.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := attacker.StdoutPipe()
	if err == nil {
		err = attacker.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(in.Close(), attacker.Wait()); err != nil {
			t.Error(err)
		}
	}()
	if _, err := io.ReadFull(out, make([]byte, len("locked\n"))); err != nil {
		t.Fatal(err)
	}
	j := start(t, 3, "sums", "TMPDIR="+dir, "XDG_RUNTIME_DIR=")
	j.ends(0)
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v, want only the folder of the other user", left, err)
	}
}

// door is a listening port of a job, with the purpose for which a handshake succeeds there.
type door struct {
	port    int
	purpose string
	tls     bool // whether HVD_TLS is set
}

// keyed returns key as the server at d uses it. The store and the root always use TLS.
func (d door) keyed(key secret.Secret) secret.Secret {
	if d.tls || d.purpose != "ghvd" {
		return key.Encrypted()
	}
	return key
}

func (d door) dial() (net.Conn, error) {
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", d.port))
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(doorDeadline))
	}
	return conn, err
}

// enter connects to d, proves that it knows the secret, and closes the connection. It returns an error if the
// server refuses the connection.
func (d door) enter(key secret.Secret) error {
	conn, err := d.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	over, err := d.keyed(key).Dial(conn, d.purpose)
	if err != nil {
		return err
	}
	return accepted(over)
}

// find returns the ports of the given processes on which a handshake with the key succeeds, each with the
// purpose that the handshake named.
func find(t *testing.T, pids []int, key secret.Secret, tls bool) (doors []door) {
	t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, pid := range pids {
		for _, port := range listening(t, pid) {
			for _, purpose := range purposes {
				// The ports are tried in parallel, because a server with another protocol may wait for more
				// bytes before it closes the connection.
				wg.Go(func() {
					d := door{port, purpose, tls}
					conn, err := d.dial()
					if err != nil {
						t.Error(err)
						return
					}
					defer conn.Close()
					conn.SetDeadline(time.Now().Add(5 * time.Second))
					over, err := d.keyed(key).Dial(conn, purpose)
					if err == nil {
						err = accepted(over)
					}
					if err == nil {
						mu.Lock()
						defer mu.Unlock()
						doors = append(doors, d)
					}
				})
			}
		}
	}
	wg.Wait()
	return doors
}

// accepted returns an error if the server closes the connection after the client's proof. The server sends no
// reply to a proof, so the connection counts as accepted if it is still open after 200 ms.
func accepted(conn net.Conn) error {
	conn.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	_, err := conn.Read(make([]byte, 1))
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() || err == nil {
		return nil
	}
	return err
}

// overheard is a connection that keeps a copy of all bytes that were written to it.
type overheard struct {
	net.Conn
	said *bytes.Buffer
}

func (o overheard) Write(b []byte) (int, error) {
	o.said.Write(b)
	return o.Conn.Write(b)
}

// attack connects to d with a wrong secret, with a captured handshake, and without a proof. The test fails if
// d accepts one of these, refuses the right secret, or leaves a connection open.
func (d door) attack(t *testing.T, key, wrong secret.Secret) {
	t.Helper()
	conn, err := d.dial()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := wrong.Dial(conn, d.purpose); !errors.Is(err, secret.ErrWrong) {
		t.Errorf("%v: another secret: got %v", d, err)
	}
	conn.Close()

	if conn, err = d.dial(); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	if _, err := key.Dial(overheard{conn, &said}, d.purpose); err != nil {
		t.Errorf("%v: with the secret: %v", d, err)
	}
	conn.Close()
	length := binary.BigEndian.AppendUint64(nil, 1<<60)
	for name, words := range map[string][]byte{
		"what was overheard":      said.Bytes(),
		"and a length":            append(said.Bytes(), length...),
		"no proof":                append([]byte(d.purpose), length...),
		"2^60":                    length,
		"2^60, the other way":     binary.LittleEndian.AppendUint64(nil, 1<<60),
		"a request of a web page": []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
	} {
		if err := d.say(words); err != nil {
			t.Errorf("%v: %s: %v", d, name, err)
		}
	}
}

// say sends bytes to d. It returns an error if the server does not close the connection within doorDeadline.
func (d door) say(words []byte) error {
	conn, err := d.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write(words); err == nil {
		_ = conn.(*net.TCPConn).CloseWrite()
	}
	_, err = io.Copy(io.Discard, conn)
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return fmt.Errorf("not closed after %v", doorDeadline)
	}
	return nil
}

// halfOpen opens 1,000 connections to the doors and sends nothing on them. It checks that a peer with the
// secret can still connect, and that the server closes all silent connections.
func halfOpen(t *testing.T, doors []door, key secret.Secret) {
	t.Helper()
	const many = 1000
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range many {
		for _, d := range doors {
			conn, err := d.dial()
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, conn)
		}
	}
	for _, d := range doors {
		// The server may close this connection to make room for others. So enter is retried, as a rank does.
		ctx, cancel := context.WithTimeout(t.Context(), doorDeadline)
		err := dial.Retry(ctx, func() error { return d.enter(key) })
		cancel()
		if err != nil {
			t.Errorf("%v: with the secret, among %d who say nothing: %v", d, many, err)
		}
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	open := 0
	for _, conn := range conns {
		wg.Go(func() {
			conn.SetDeadline(time.Now().Add(doorDeadline))
			_, err := io.Copy(io.Discard, conn)
			if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
				mu.Lock()
				open++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if open > 0 {
		t.Errorf("%d of %d connections that say nothing are still open after %v", open, len(conns),
			doorDeadline)
	}
}

// variable returns the value of a variable in the initial environment of a process, or "" if the variable was
// not set.
func variable(t *testing.T, pid int, name string) string {
	t.Helper()
	text := testnet.ReadFile(t, fmt.Sprintf("/proc/%d/environ", pid))
	for v := range strings.SplitSeq(string(text), "\x00") {
		if value, ok := strings.CutPrefix(v, name+"="); ok {
			return value
		}
	}
	return ""
}
