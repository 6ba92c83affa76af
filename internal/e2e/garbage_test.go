package e2e

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// An unauthenticated peer sends garbage to each port of a job. The job goes on. Its processes do not trust
// the lengths in the garbage: they do not allocate memory for them.
func TestGarbageOnEveryPort(t *testing.T) {
	stop := filepath.Join(t.TempDir(), "stop")
	j := start(t, 3, "steady", stopVariable+"="+stop, "HOROVOD_LOG_LEVEL=info")
	pids := append(j.ready(3), j.cmd.Process.Pid)
	var ports []int
	before := map[int]int{}
	for _, pid := range pids {
		ports = append(ports, listening(t, pid)...)
		before[pid] = peakMiB(t, pid)
	}
	// The ports belong to the job's store and torch's store in hvdrun, rank 0's root, and the endpoint of
	// each rank.
	if len(ports) != 6 {
		t.Errorf("the job listens on %d ports, want 6", len(ports))
	}
	for _, port := range ports {
		for name, garbage := range map[string][]byte{
			"http":     []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
			"ones":     bytes.Repeat([]byte{0xff}, 1<<16),
			"zeros":    make([]byte, 1<<16),
			"tls":      {0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03, 0x03},
			"a byte":   {'H'},
			"nothing":  {},
			"proof":    append([]byte("GHVA\x01\x00\x00\x00"), bytes.Repeat([]byte{7}, 64)...),
			"protocol": []byte("HVD1\x00\x00\x00\x01\xff\xff\xff\x7f\xff\xff\xff\x7f"),
		} {
			if err := throw(port, garbage); err != nil {
				t.Errorf("%s on port %d: %v", name, port, err)
			}
		}
	}
	// Nothing is sent on this connection until the job ends.
	silent, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", ports[len(ports)-1]))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for _, pid := range pids {
		if after := peakMiB(t, pid); after > before[pid]+32 {
			t.Errorf("process %d grew from %d to %d MiB", pid, before[pid], after)
		}
	}
	testnet.WriteFile(t, stop, "")
	j.ends(0)
	if n := strings.Count(j.out(), "]<stdout>:rounds "); n != 3 {
		t.Errorf("%d ranks finished, want 3:\n%s", n, j.out())
	}
	for rank := range 3 {
		if !strings.Contains(j.err(), fmt.Sprintf("[%d]<stderr>:", rank)) {
			t.Errorf("rank %d logged nothing about what it refused:\n%s", rank, j.err())
		}
	}
}

// throw sends garbage to a port and closes the sending direction. It returns an error if the server does not
// close the connection within doorDeadline.
func throw(port int, garbage []byte) error {
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(doorDeadline)); err != nil {
		return err
	}
	if _, err := c.Write(garbage); err == nil {
		_ = c.(*net.TCPConn).CloseWrite()
	}
	_, err = io.Copy(io.Discard, c)
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return errors.New("the connection is still open")
	}
	return nil // an end of file or a reset has ended the connection
}

// listening returns the TCP ports on which a process listens.
func listening(t *testing.T, pid int) []int {
	inodes := map[string]bool{}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		if err != nil {
			continue // the process has closed the descriptor in the meantime
		}
		if inode, ok := strings.CutPrefix(target, "socket:["); ok {
			inodes[strings.TrimSuffix(inode, "]")] = true
		}
	}
	var ports []int
	for _, table := range []string{"tcp", "tcp6"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue // the kernel has no IPv6
		}
		for _, row := range strings.Split(string(text), "\n")[1:] {
			f := strings.Fields(row)
			const listen = "0A"
			if len(f) < 10 || f[3] != listen || !inodes[f[9]] {
				continue
			}
			_, port, _ := strings.Cut(f[1], ":")
			b, err := hex.DecodeString(port)
			if err != nil {
				t.Fatal(err)
			}
			ports = append(ports, int(b[0])<<8|int(b[1]))
		}
	}
	return ports
}

// peakMiB returns the peak resident memory of a process in MiB.
func peakMiB(t *testing.T, pid int) int {
	text := testnet.ReadFile(t, fmt.Sprintf("/proc/%d/status", pid))
	for _, row := range strings.Split(string(text), "\n") {
		var kib int
		if _, err := fmt.Sscanf(row, "VmHWM: %d kB", &kib); err == nil {
			return kib >> 10
		}
	}
	t.Fatalf("process %d has no VmHWM", pid)
	return 0
}
