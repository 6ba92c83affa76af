package doctor

import (
	"context"
	"strconv"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
)

const fixLauncher = "set the missing variables, start the process with a launcher that sets them, or set " +
	"HVD_SIZE=1 for a job of one rank"

// launcher reports which launcher has started this process. For each other launcher it reports why the
// environment does not match that launcher.
func launcher(_ context.Context, s *System) []Line {
	env, found, err := bootstrap.Detect(s.getenv)
	var lines []Line
	for _, l := range found {
		switch {
		case l.Matched:
			port, _ := strconv.Atoi(s.getenv("HVD_RENDEZVOUS_PORT")) // hvdrun config checks it
			where, met := env.Where(s.getenv("HVD_RENDEZVOUS_HOST"), port)
			for _, name := range []string{"HVD_INIT_METHOD", "HVD_UNIQUE_ID"} {
				if s.getenv(name) != "" {
					where, met = "at "+name, true
				}
			}
			line := ok(string(l.Kind), "%s; the ranks meet %s", l.Why, where)
			if !met {
				line = fail(line.Name, fixLauncher, "%s", line.Text)
			}
			lines = append(lines, line)
		case l.Suspect && err == nil:
			lines = append(lines, warn(string(l.Kind),
				"start the ranks with one launcher, or set HVD_SIZE to the number of ranks if the job is to have fewer",
				"%s", l.Why))
		default:
			lines = append(lines, ok(string(l.Kind), "%s", l.Why))
		}
	}
	if err != nil {
		lines = append(lines,
			fail("", fixLauncher, "%v", err))
	}
	return lines
}

// variables lists the settings in the environment in the order of their table, including those that a
// launcher sets. It does not check the values, because hvdrun config does.
func variables(_ context.Context, s *System) []Line {
	var lines []Line
	for _, setting := range config.Settings() {
		value := s.getenv(setting.Name)
		switch {
		case value == "":
		case setting.Secret:
			lines = append(lines, ok(setting.Name, "set, not shown"))
		default:
			lines = append(lines, ok(setting.Name, "%s", value))
		}
	}
	if len(lines) == 0 {
		return []Line{ok("", "no setting of gohvd is set")}
	}
	return lines
}
