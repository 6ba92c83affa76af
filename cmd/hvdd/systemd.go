package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/sidecar"
)

// notifyTimeout is the time limit for a message to systemd, in case systemd does not read it.
const notifyTimeout = 100 * time.Millisecond

// notifier reports the state of the daemon to systemd (sd_notify). A zero notifier reports nothing.
type notifier struct {
	path  string
	every time.Duration // interval between watchdog messages; 0 means that none are sent
	log   *zap.Logger
}

func newNotifier(settings *config.Config, log *zap.Logger) notifier {
	n := notifier{path: settings.Variable("NOTIFY_SOCKET"), log: log}
	pid := settings.Variable("WATCHDOG_PID")
	if usec, err := strconv.ParseInt(settings.Variable("WATCHDOG_USEC"), 10, 64); err == nil && usec > 0 &&
		(pid == "" || pid == strconv.Itoa(os.Getpid())) {
		// The interval is half of the watchdog's timeout, as sd_watchdog_enabled(3) recommends.
		n.every = time.Duration(usec) * time.Microsecond / 2
	}
	return n
}

// send sends lines of the form NAME=value. It only logs errors, because hvdd also works without systemd.
func (n notifier) send(lines string) {
	if n.path == "" {
		return
	}
	// A path with a leading @ means an abstract socket.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Net: "unixgram", Name: n.path})
	if err == nil {
		if err = conn.SetDeadline(time.Now().Add(notifyTimeout)); err == nil {
			_, err = conn.Write([]byte(lines))
		}
		err = errors.Join(err, conn.Close())
	}
	if err != nil {
		n.log.Warn("cannot notify systemd", zap.Error(err))
	}
}

// run reports that the daemon is ready. Then it reports at the watchdog's interval that the daemon is alive,
// until done is closed.
func (n notifier) run(s *sidecar.Server, done <-chan struct{}) {
	if n.path == "" {
		return
	}
	n.send("READY=1\n" + status(s))
	if n.every == 0 {
		return
	}
	tick := time.NewTicker(n.every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			// status waits for the lock of the Server, so hvdd does not report that it is alive if the Server
			// hangs.
			n.send("WATCHDOG=1\n" + status(s))
		case <-done:
			return
		}
	}
}

func status(s *sidecar.Server) string {
	r := s.Report()
	client := "no client"
	if r.Connected {
		client = "a client"
	}
	return fmt.Sprintf("STATUS=%s, %s, %d operations done\n", r.State, client, r.Operations)
}
