package dial

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

const (
	// checksPerLimit is the number of checks in the time limit of a Silence.
	checksPerLimit = 10
	// minAttempts is the minimum number of retransmissions or probes that must be unanswered, because single
	// packets are lost also on a network that works, and the peer does not answer two probes that arrive
	// within 500 ms. The kernel may pause for up to two minutes between the probes of a closed window.
	minAttempts = 3
	// probesPerLimit is the number of keep-alive probes in that time, if it is long enough for intervals of a
	// second. The kernel itself ends a connection after maxProbes unanswered probes, later than a Silence
	// does.
	probesPerLimit = 8
	maxProbes      = 2 * probesPerLimit
	// maxIdle is the maximum time after which the kernel probes an idle connection for the first time.
	maxIdle = 5 * time.Second
)

// Silence finds out that the network silently drops the packets of a TCP connection, in which case the
// connection does not end: reading waits forever, and the kernel retransmits for about 15 minutes. The kernel
// of a living peer acknowledges data, window probes and keep-alive probes at once, even if the peer's process
// does not read or is stopped. So the connection is lost if nothing that was sent has been acknowledged for
// the time limit, although it was sent several times. A peer that does not read for any length of time is not
// lost.
//
// With the same limit for heartbeats over another connection, a Silence finds the loss of a whole host at
// least one check later than the heartbeats do.
//
// TCP_USER_TIMEOUT is not a substitute, because it also ends connections whose peer acknowledges window
// probes, but has no room for more data.
//
// The owner of a connection calls Check regularly. The zero Silence cannot be used. A Silence must not be
// used by two goroutines at the same time.
type Silence struct {
	limit   time.Duration
	log     *zap.Logger
	asked   bool      // whether the kernel was asked to probe the connection
	checked time.Time // time of the last check
	waiting bool      // whether the last check has found that an acknowledgement is missing
	// silent is for how long it has been missing since a check has found that, and retransmits is the number
	// of retransmissions at that check.
	silent      time.Duration
	retransmits uint8
	acked       uint64 // number of bytes that had been acknowledged at the last check
}

// NewSilence returns a Silence for a new connection. It has the given time limit, which must be positive. If
// the kernel refuses to probe the connection, the first Check logs a warning.
func NewSilence(limit time.Duration, log *zap.Logger) *Silence {
	return &Silence{limit: limit, log: log}
}

// CheckPeriod returns the time between two calls of Check that suits the given time limit.
func CheckPeriod(limit time.Duration) time.Duration { return limit / checksPerLimit }

// SilenceError reports that the peer's host has acknowledged nothing for the time limit.
type SilenceError struct{ Limit time.Duration }

func (e *SilenceError) Error() string {
	return fmt.Sprintf("no acknowledgement for %v: the host is gone, or the network drops the packets of the connection", e.Limit)
}

// Check checks the connection with the descriptor fd. It returns a *SilenceError if the connection is lost,
// and an error of another type if the check has failed. It does not block. If the time between two calls is
// much longer than CheckPeriod, Check assumes that this process was stopped, and does not count that time.
func (s *Silence) Check(fd int, now time.Time) error {
	if !s.asked {
		s.asked = true
		if err := s.probe(fd); err != nil {
			s.log.Warn("the kernel does not probe an idle connection, so a loss is found only when data is sent",
				zap.Error(err))
		}
	}
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return os.NewSyscallError("getsockopt", err)
	}
	return s.observe(info, now)
}

// CheckConn is like Check for conn, which is a TCP connection, or TLS over one. For other connections it does
// nothing.
func (s *Silence) CheckConn(conn net.Conn, now time.Time) error {
	for {
		switch c := conn.(type) {
		case interface{ NetConn() net.Conn }:
			conn = c.NetConn()
			continue
		case *net.TCPConn:
			raw, err := c.SyscallConn()
			if err != nil {
				return err
			}
			return errors.Join(raw.Control(func(fd uintptr) { err = s.Check(int(fd), now) }), err)
		}
		return nil
	}
}

// probe makes the kernel probe the connection while it is idle. So a process that only receives also notices
// that the connection is lost.
func (s *Silence) probe(fd int) error {
	interval := max(s.limit/probesPerLimit, time.Second)
	for _, o := range []struct {
		name                 string
		level, option, value int
	}{
		{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, wholeSeconds(min(s.limit/4, maxIdle))},
		{"TCP_KEEPINTVL", unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, wholeSeconds(interval)},
		{"TCP_KEEPCNT", unix.IPPROTO_TCP, unix.TCP_KEEPCNT, maxProbes},
		{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.option, o.value); err != nil {
			return fmt.Errorf("set %s to %d: %w", o.name, o.value, err)
		}
	}
	return nil
}

// wholeSeconds returns d in seconds, rounded up. The result is at least 1 and at most what the kernel
// accepts.
func wholeSeconds(d time.Duration) int {
	const most = 32767 // MAX_TCP_KEEPIDLE and MAX_TCP_KEEPINTVL in net/tcp.h
	return min(max(int((d+time.Second-1)/time.Second), 1), most)
}

// observe updates s with the state of the connection.
func (s *Silence) observe(info *unix.TCPInfo, now time.Time) error {
	period := CheckPeriod(s.limit)
	silent := s.silent + min(now.Sub(s.checked), 2*period)
	s.checked = now
	// An acknowledgement is missing if the kernel has sent data or a probe after the last one arrived. Probes
	// counts keep-alive probes and window probes, until any acknowledgement arrives. Retransmits counts
	// timeouts, until data is acknowledged.
	missing := info.Probes > 0 || info.Unacked > 0 && info.Last_data_sent < info.Last_ack_recv
	answered := time.Duration(info.Last_ack_recv)*time.Millisecond < silent
	if info.Unacked > 0 && info.Snd_wnd > 0 {
		// A peer that has room acknowledges data at once. The network may drop packets in only one direction:
		// then the peer's data and probes arrive, and the kernel counts them as acknowledgements.
		missing, answered = true, info.Bytes_acked != s.acked
	}
	s.acked = info.Bytes_acked
	if !missing || !s.waiting || answered {
		s.waiting, s.silent, s.retransmits = missing, 0, info.Retransmits
		return nil
	}
	s.silent = silent
	attempts := max(info.Probes, info.Retransmits-s.retransmits)
	if silent < s.limit+period || attempts < minAttempts {
		return nil
	}
	return &SilenceError{s.limit}
}
