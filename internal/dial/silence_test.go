package dial

import (
	"errors"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// TestObserve checks from which states of a connection a Silence concludes that the connection is lost. Each
// state is that at one check, and checks are a period apart.
func TestObserve(t *testing.T) {
	const limit = 10 * time.Second
	period := CheckPeriod(limit)
	ms := func(d time.Duration) uint32 { return uint32(d.Milliseconds()) }
	// The functions return the state at a check, by the time since the first check.
	type state func(since time.Duration) unix.TCPInfo
	unanswered := func(since time.Duration) unix.TCPInfo {
		return unix.TCPInfo{Unacked: 3, Last_data_sent: ms(since / 2), Last_ack_recv: ms(since + time.Minute),
			Retransmits: uint8(since / time.Second)}
	}
	probed := func(since time.Duration) unix.TCPInfo {
		return unix.TCPInfo{Probes: uint8(1 + since/time.Second), Last_data_sent: ms(time.Hour),
			Last_ack_recv: ms(since + time.Minute)}
	}
	// times returns the states of a connection over which the kernel has sent only n times.
	times := func(n uint8, of state) state {
		return func(since time.Duration) unix.TCPInfo {
			info := of(since)
			info.Probes, info.Retransmits = min(info.Probes, n), min(info.Retransmits, n)
			return info
		}
	}
	for _, c := range []struct {
		name  string
		state state
		want  int // the number of the check that finds the loss, or 0
	}{
		{"nothing is acknowledged", unanswered, 1 + checksPerLimit + 1},
		{"no probe is acknowledged", probed, 1 + checksPerLimit + 1},
		{"two probes are lost", times(2, probed), 0},
		{"three probes are lost", times(3, probed), 1 + checksPerLimit + 1},
		{"two retransmissions are lost", times(2, unanswered), 0},
		{"idle", func(since time.Duration) unix.TCPInfo {
			return unix.TCPInfo{Last_data_sent: ms(since), Last_ack_recv: ms(since + time.Second)}
		}, 0},
		{"data flows", func(time.Duration) unix.TCPInfo {
			return unix.TCPInfo{Unacked: 100, Last_data_sent: 0, Last_ack_recv: 4}
		}, 0},
		{"acknowledged after each check", func(time.Duration) unix.TCPInfo {
			return unix.TCPInfo{Unacked: 1, Last_data_sent: 0, Last_ack_recv: ms(period) - 1}
		}, 0},
		{"the last transmission was answered, without progress", func(since time.Duration) unix.TCPInfo {
			return unix.TCPInfo{Unacked: 1, Last_data_sent: ms(since + time.Second), Last_ack_recv: ms(since)}
		}, 0},
		{"the window is closed, the last probe was answered", func(since time.Duration) unix.TCPInfo {
			return unix.TCPInfo{Notsent_bytes: 9999, Last_data_sent: ms(since), Last_ack_recv: ms(since)}
		}, 0},
		{"only the peer's own packets arrive", func(since time.Duration) unix.TCPInfo {
			return unix.TCPInfo{Unacked: 1, Snd_wnd: 9999, Bytes_acked: 7, Last_data_sent: ms(period),
				Last_ack_recv: 1, Retransmits: uint8(since / time.Second)}
		}, 1 + checksPerLimit + 1},
		{"a peer with room acknowledges little by little", func(since time.Duration) unix.TCPInfo {
			return unix.TCPInfo{Unacked: 100, Snd_wnd: 9999, Bytes_acked: uint64(since / (limit / 2)),
				Retransmits: uint8(since / time.Second), Last_ack_recv: ms(time.Hour)}
		}, 0},
		{"answered shortly before the limit", func(since time.Duration) unix.TCPInfo {
			if since < limit {
				return unanswered(since)
			}
			return unix.TCPInfo{Unacked: 3, Retransmits: uint8(since / time.Second),
				Last_ack_recv: ms(since - limit + period/2)}
		}, 1 + 2*checksPerLimit + 1},
	} {
		s, start := NewSilence(limit, zap.NewNop()), time.Now()
		got := 0
		for n := 1; n < 5*checksPerLimit && got == 0; n++ {
			since := time.Duration(n-1) * period
			info := c.state(since)
			if err := s.observe(&info, start.Add(since)); err != nil {
				if e, ok := errors.AsType[*SilenceError](err); !ok || e.Limit != limit {
					t.Errorf("%s: got %v", c.name, err)
				}
				got = n
			}
		}
		if got != c.want {
			t.Errorf("%s: check %d finds the loss, want %d", c.name, got, c.want)
		}
	}
}

// TestStoppedChecks checks that the time during which this process was stopped hardly counts.
func TestStoppedChecks(t *testing.T) {
	const limit = 10 * time.Second
	s, now := NewSilence(limit, zap.NewNop()), time.Now()
	lost := unix.TCPInfo{Probes: 9, Last_ack_recv: 1e6}
	for range checksPerLimit / 2 {
		if err := s.observe(&lost, now); err != nil {
			t.Fatal(err)
		}
		now = now.Add(time.Hour)
	}
}
