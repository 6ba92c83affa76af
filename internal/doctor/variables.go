package doctor

import (
	"context"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/launchenv"
)

// launcher says which launcher has started this process, and of every other why it was not.
func launcher(_ context.Context, s *System) []Line {
	_, found, err := launchenv.Detect(s.getenv)
	var lines []Line
	for _, l := range found {
		lines = append(lines, ok(string(l.Kind), "%s", l.Why))
	}
	if err != nil {
		lines = append(lines, fail("", "unset what is wrong, or start the process with the launcher that sets all of it", "%v", err))
	}
	return lines
}

// secretVariable is the one whose value is shown to nobody.
const secretVariable = "HVD_SECRET"

// variables lists the settings that the environment has, in the order of their table: what places a rank in a job among
// them. hvdrun config says whether their values are good.
func variables(_ context.Context, s *System) []Line {
	var lines []Line
	for _, setting := range config.Settings() {
		value := s.getenv(setting.Name)
		switch {
		case value == "":
		case setting.Name == secretVariable:
			lines = append(lines, ok(setting.Name, "set, not shown"))
		default:
			lines = append(lines, ok(setting.Name, "%s", value))
		}
	}
	if len(lines) == 0 {
		return []Line{ok("", "none of gohvd's is set: no rank of a job")}
	}
	return lines
}
