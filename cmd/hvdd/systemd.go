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

// notifyTimeout bounds what a service manager that does not read can cost.
const notifyTimeout = 100 * time.Millisecond

// notifier tells systemd how the daemon is (sd_notify). The zero notifier tells nobody.
type notifier struct {
	path  string
	every time.Duration // of the watchdog; 0 is none
	log   *zap.Logger
}

func newNotifier(settings *config.Config, log *zap.Logger) notifier {
	n := notifier{path: settings.Variable("NOTIFY_SOCKET"), log: log}
	pid := settings.Variable("WATCHDOG_PID")
	if usec, err := strconv.ParseInt(settings.Variable("WATCHDOG_USEC"), 10, 64); err == nil && usec > 0 && (pid == "" || pid == strconv.Itoa(os.Getpid())) {
		n.every = time.Duration(usec) * time.Microsecond / 2 // as sd_watchdog_enabled advises
	}
	return n
}

// tell sends lines of NAME=value. A service manager that does not listen is no reason to fail.
func (n notifier) tell(lines string) {
	if n.path == "" {
		return
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Net: "unixgram", Name: n.path}) // an @ in front is understood
	if err == nil {
		if err = conn.SetDeadline(time.Now().Add(notifyTimeout)); err == nil {
			_, err = conn.Write([]byte(lines))
		}
		err = errors.Join(err, conn.Close())
	}
	if err != nil {
		n.log.Warn("cannot tell systemd", zap.Error(err))
	}
}

// run says that the daemon is ready, and then, as often as the watchdog wants, that it lives, until done is closed.
func (n notifier) run(s *sidecar.Server, done <-chan struct{}) {
	if n.path == "" {
		return
	}
	n.tell("READY=1\n" + status(s))
	if n.every == 0 {
		return
	}
	tick := time.NewTicker(n.every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			n.tell("WATCHDOG=1\n" + status(s)) // status waits for who holds the Server up
		case <-done:
			return
		}
	}
}

func status(s *sidecar.Server) string {
	r := s.Report()
	return fmt.Sprintf("STATUS=%s, %d clients, %d operations done\n", r.State, r.Clients, r.Operations)
}
