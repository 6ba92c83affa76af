// Measures the MPI collectives of an allreduce of 4 bytes in lock-step (docs/mpi.md, Speed): an allreduce of bit
// vectors of 24 bytes, the broadcast of a decision of 512 bytes unless the ranks repeat one, and the allreduce itself.
// Rank 0 prints the medians of the times with the broadcast, without it, and without it but with persistent requests,
// in microseconds. The last one is missing if the library has no persistent collectives.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif
#if MPI_VERSION >= 4
#define ALLREDUCE_INIT MPI_Allreduce_init
#elif defined OMPI_HAVE_MPI_EXT_PCOLLREQ
#define ALLREDUCE_INIT MPIX_Allreduce_init
#endif

enum { WARMUP = 5000, CALLS = 100000 };

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void complete(MPI_Request *r) {
  for (int done = 0; !done;) MPI_Test(r, &done, MPI_STATUS_IGNORE);
}

static MPI_Comm negotiation, data;
static uint64_t votes[3] = {1, 2, 3};
static char decision[512];
static float x;

static void calls(int broadcasts) {
  MPI_Request r;
  MPI_Iallreduce(MPI_IN_PLACE, votes, 3, MPI_UINT64_T, MPI_BAND, negotiation, &r);
  complete(&r);
  if (broadcasts) {
    MPI_Ibcast(decision, sizeof decision, MPI_BYTE, 0, negotiation, &r);
    complete(&r);
  }
  MPI_Iallreduce(MPI_IN_PLACE, &x, 1, MPI_FLOAT, MPI_SUM, data, &r);
  complete(&r);
}

static void three(void) { calls(1); }
static void two(void) { calls(0); }

static MPI_Request persistent[2];

static void repeated(void) {
  for (int i = 0; i < 2; i++) {
    MPI_Start(&persistent[i]);
    complete(&persistent[i]);
  }
}

static double median(void run(void)) {
  static double times[CALLS];
  for (int i = -WARMUP; i < CALLS; i++) {
    double start = MPI_Wtime();
    run();
    if (i >= 0) times[i] = MPI_Wtime() - start;
  }
  qsort(times, CALLS, sizeof *times, compare);
  return 1e6 * times[CALLS / 2];
}

int main(int argc, char **argv) {
  int level, rank;
  // gohvd sets this parameter of Open MPI too, and initializes MPI at this level.
  setenv("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "3", 0);
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_dup(MPI_COMM_WORLD, &negotiation);
  MPI_Comm_dup(MPI_COMM_WORLD, &data);
  double with = median(three), without = median(two);
  if (rank == 0) printf("%.3f %.3f", with, without);
#ifdef ALLREDUCE_INIT
  ALLREDUCE_INIT(MPI_IN_PLACE, votes, 3, MPI_UINT64_T, MPI_BAND, negotiation, MPI_INFO_NULL, &persistent[0]);
  ALLREDUCE_INIT(MPI_IN_PLACE, &x, 1, MPI_FLOAT, MPI_SUM, data, MPI_INFO_NULL, &persistent[1]);
  double again = median(repeated);
  if (rank == 0) printf(" %.3f", again);
#endif
  if (rank == 0) printf("\n");
  MPI_Finalize();
}
