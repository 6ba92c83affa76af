/* What Go uses of gate.c. */
#ifndef GOHVD_GATE_H
#define GOHVD_GATE_H

#include "gohvd.h"

/* The facts that gohvdFact returns. */
enum {
	GOHVD_RANK,
	GOHVD_SIZE,
	GOHVD_LOCAL_RANK,
	GOHVD_LOCAL_SIZE,
	GOHVD_CROSS_RANK,
	GOHVD_CROSS_SIZE,
	GOHVD_HOMOGENEOUS,
	GOHVD_DEVICES,
	GOHVD_EPOCH
};

/* The path of this library, or NULL if it is not known. It is set before a function of gohvd.h is called, but
 * maybe after the packages of Go were initialized. */
extern char *gohvd_path;

/* The fdinfo file of the Go runtime's epoll instance. It lists the control connections and the connection to a sidecar, or
 * nested epoll instances that contain them. gohvd_poller is an empty text if the file is not known. */
extern char gohvd_poller[64];

/* The inode numbers of the sockets to other ranks: the number of places that were ever used, and then the places, which
 * are 0 if they are free (ListInodes of package tcp). */
#define GOHVD_MAX_INODES (1 << 14)
extern uint64_t gohvd_inodes[GOHVD_MAX_INODES];

/* gohvd_restore_limit undoes the change of the Go runtime to the limit of open files. */
void gohvd_restore_limit(void);

/* gohvd_set_error stores copies of the details of an error for hvd_last_error in this thread. It returns status. */
hvd_status_t gohvd_set_error(hvd_status_t status, const char *text, const char *operation, const char *tensor,
                             const int32_t *ranks, uint32_t num_ranks, uint32_t shut_down);

#endif
