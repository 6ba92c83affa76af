package doctor

import (
	"context"
	"strings"
	"sync"
	"time"
)

// maxAgents caps the number of agents that run at the same time.
const maxAgents = 32

// agent checks that the program that reaches other hosts, such as ssh, can be found.
func agent(_ context.Context, s *System) []Line {
	name := s.Agent("HOST", nil)[0]
	file, err := s.LookPath(name)
	const fix = "install it (Debian: apt install openssh-client), or give another command with --agent"
	switch {
	case err == nil:
		return []Line{ok("", "%s", file)}
	case len(s.Hosts) > 0:
		return []Line{fail("", fix, "%v", err)}
	default:
		return []Line{warn("", fix, "%v; only jobs on several hosts need it", err)}
	}
}

// hosts runs the command true on each host, concurrently.
func hosts(ctx context.Context, s *System) []Line {
	if len(s.Hosts) == 0 {
		return []Line{ok("", "no other hosts were given with --hosts")}
	}
	lines := make([]Line, len(s.Hosts))
	turns := make(chan struct{}, maxAgents)
	var wg sync.WaitGroup
	for i, host := range s.Hosts {
		wg.Go(func() {
			name := "host " + host
			select {
			case turns <- struct{}{}:
				defer func() { <-turns }()
				lines[i] = s.try(ctx, name, host)
			case <-ctx.Done():
				lines[i] = warn(name, "check fewer hosts at once",
					"not tried, because the other hosts took all the time")
			}
		})
	}
	wg.Wait()
	return lines
}

// try runs the command true on one host.
func (s *System) try(ctx context.Context, name, host string) Line {
	argv := s.Agent(host, []string{"true"})
	start := time.Now()
	stderr, err := s.Reach(ctx, argv)
	took := time.Since(start)
	if err == nil {
		return ok(name, "reached in %v", took.Round(time.Millisecond))
	}
	command := strings.Join(argv, " ")
	if ctx.Err() != nil {
		return fail(name, "run it by hand to see why it hangs: "+command, "no answer within %v",
			took.Round(100*time.Millisecond))
	}
	text := err.Error()
	if last := lastLine(stderr); last != "" {
		text += ": " + last
	}
	return fail(name, fixFor(host, stderr, command), "%s", text)
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return strings.TrimSpace(text[strings.LastIndexByte(text, '\n')+1:])
}

// fixFor returns the fix for the error message of OpenSSH in stderr.
func fixFor(host, stderr, command string) string {
	for _, c := range []struct{ says, fix string }{
		{"Host key verification failed", "verify the host's key, and accept it by running once: ssh " + host},
		{"Permission denied", "install your public key on the host: ssh-copy-id " + host},
		{"Could not resolve hostname", "correct the name, or add it to /etc/hosts, the DNS or ~/.ssh/config"},
		{"Connection refused",
			"start sshd on the host, or give its port with --ssh-port or in ~/.ssh/config"},
		{"timed out", "check that the host is up and that its firewall permits port 22"},
		{"No route to host", "check that the host is up and on this network"},
	} {
		if strings.Contains(stderr, c.says) {
			return c.fix
		}
	}
	return "run it by hand: " + command
}
