package e2e

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
)

// capture records the TCP packets on the loopback device.
type capture struct {
	f  *os.File
	wg sync.WaitGroup

	mu      sync.Mutex
	packets []packet
	bytes   map[[2]int]int // by the ports of a packet
}

// packet is the payload of a TCP packet over IPv4, with the packet's ports.
type packet struct {
	ports [2]int
	data  []byte
}

const (
	// maxCapture limits the bytes that a capture keeps of the packets from one port to another one. Other
	// tests may send much more over the loopback device at the same time.
	maxCapture = 64 << 10
	// captureBuffer is the size of the buffer of the socket.
	captureBuffer = 64 << 20
)

func startCapture(t *testing.T) *capture {
	t.Helper()
	ipv4 := binary.NativeEndian.Uint16([]byte{0x08, 0x00}) // the EtherType of IPv4 in network byte order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(ipv4))
	if err != nil {
		t.Fatal(err)
	}
	c := &capture{f: os.NewFile(uintptr(fd), "capture"), bytes: make(map[[2]int]int)}
	t.Cleanup(c.stop)
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer); err != nil {
		t.Logf("the capture may lose packets: %v", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: ipv4, Ifindex: lo.Index}); err != nil {
		t.Fatal(err)
	}
	c.wg.Go(func() {
		buf := make([]byte, 1<<17)
		for {
			n, err := c.f.Read(buf)
			if err != nil {
				return
			}
			c.keep(buf[:n])
		}
	})
	return c
}

// keep records the payload of an IPv4 packet if it is a TCP packet.
func (c *capture) keep(ip []byte) {
	if len(ip) < 20 || ip[9] != unix.IPPROTO_TCP {
		return
	}
	tcp := ip[min(len(ip), int(ip[0]&15)*4):]
	if len(tcp) < 20 {
		return
	}
	data := tcp[min(len(tcp), int(tcp[12]>>4)*4):]
	ports := [2]int{int(binary.BigEndian.Uint16(tcp)), int(binary.BigEndian.Uint16(tcp[2:]))}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bytes[ports] += len(data)
	if len(data) == 0 || c.bytes[ports] > maxCapture {
		return
	}
	c.packets = append(c.packets, packet{ports, bytes.Clone(data)})
}

// of returns the captured packets that were sent from or to one of the ports, and the total size of their
// payloads.
func (c *capture) of(ports map[int]bool) (packets []packet, numBytes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.packets {
		if ports[p.ports[0]] || ports[p.ports[1]] {
			packets, numBytes = append(packets, p), numBytes+len(p.data)
		}
	}
	return packets, numBytes
}

func (c *capture) stop() {
	c.f.Close()
	c.wg.Wait()
}

// The network traffic of a job is captured. Without encryption it contains the tensors, their names and the
// name of the job. With encryption it contains none of these.
func TestTLSHidesTensors(t *testing.T) {
	testnet.NeedHosts(t) // a user who may create hosts may also capture packets
	for _, test := range []struct {
		name      string
		env       string
		encrypted bool
	}{{"plain", "HVD_TLS=0", false}, {"TLS", "HVD_TLS=1", true}} {
		t.Run(test.name, func(t *testing.T) {
			c := startCapture(t)
			stop := filepath.Join(t.TempDir(), "stop")
			host := fmt.Sprintf("host-of-%d", os.Getpid())
			j := start(t, 2, "steady", stopVariable+"="+stop, "HOROVOD_CPU_OPERATIONS=tcp", "HVD_JOB_ID="+
				host, test.env)
			pids := append(j.ready(2), j.cmd.Process.Pid)
			ports := map[int]bool{}
			for _, pid := range pids {
				for _, p := range listening(t, pid) {
					ports[p] = true
				}
			}
			testnet.Eventually(t, "some rounds on the network", func() bool {
				_, heard := c.of(ports)
				return heard >= 10_000
			})
			testnet.WriteFile(t, stop, "")
			if status := j.wait(); status != 0 {
				t.Fatalf("status %d:\n%s\n%s", status, j.out(), j.err())
			}
			c.stop()
			var hellos, tensors, names int
			packets, heard := c.of(ports)
			for _, p := range packets {
				if isClientHello(p.data) {
					hellos++
				}
				if hasRound(p.data) {
					tensors++
				}
				if bytes.Contains(p.data, []byte("steady")) || bytes.Contains(p.data, []byte(host)) {
					names++
				}
			}
			t.Logf("%d bytes, %d hellos, %d packets with tensors, %d with names", heard, hellos, tensors,
				names)
			// The connections to the store and to the root use TLS in any case.
			if (tensors > 0) == test.encrypted || (names > 0) == test.encrypted || hellos == 0 {
				t.Errorf("%d packets with tensors, %d with names, %d hellos", tensors, names, hellos)
			}
		})
	}
}

// isClientHello reports whether data is a TLS ClientHello, that is, a handshake record (type 22) with a
// message of type 1.
func isClientHello(data []byte) bool {
	return len(data) > 5 && data[0] == 22 && data[1] == 3 && data[5] == 1 &&
		int(binary.BigEndian.Uint16(data[3:]))+5 == len(data)
}

// hasRound reports whether data contains a tensor of the program "steady". Such a tensor is the int64 0
// followed by the number of a round.
func hasRound(data []byte) bool {
	for i := 0; i+16 <= len(data); i++ {
		round := binary.LittleEndian.Uint64(data[i+8:])
		if binary.LittleEndian.Uint64(data[i:]) == 0 && round > 2 && round < 1<<20 {
			return true
		}
	}
	return false
}

// HVD_TLS is set at only one of two ranks. The job fails with an error that says at which.
func TestTLSOfSome(t *testing.T) {
	for _, test := range []struct {
		name  string
		ranks string // a shell command that each rank runs before its program
		env   string // a variable in the environment of hvdrun
	}{
		{"one rank without", `if [ "$HOROVOD_RANK" = 1 ]; then export HVD_TLS=0; fi`, "HVD_TLS=1"},
		{"one rank with", `if [ "$HOROVOD_RANK" = 1 ]; then export HVD_TLS=1; fi`, "HVD_TLS=0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			// The arguments of the outer shell are hvdrun, -np, 2 and the program.
			wrap := []string{"sh", "-c", `exec "$1" "$2" "$3" sh -c '` + test.ranks + `; exec "$0"' "$4"`,
				"sh"}
			j := startWith(t, wrap, 2, "sums", test.env)
			if status := j.wait(); status == 0 {
				t.Error("the job has succeeded")
			}
			before := strings.TrimPrefix(test.env, "HVD_TLS=")
			testnet.WantText(t, j.err(), "[1]<stderr>:", "HVD_TLS is "+before+" at rank 0, ")
			if strings.Contains(j.out(), "hash") {
				t.Errorf("a rank has gone on: %s", j.out())
			}
		})
	}
}
