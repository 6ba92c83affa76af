package doctor

import (
	"context"

	"github.com/gohvd/gohvd/internal/config"
)

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
